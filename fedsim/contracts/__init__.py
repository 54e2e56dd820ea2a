"""What a plugin keeps to: the contracts of attacks, defenses, learners and data sources."""
