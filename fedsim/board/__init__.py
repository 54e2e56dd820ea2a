"""The leaderboard as a page: one HTML file to read offline, or served while runs go on."""
