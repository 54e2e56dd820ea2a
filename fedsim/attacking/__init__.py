"""The attack stage: attacks recordings under a threat model, without Flower or any data set."""
