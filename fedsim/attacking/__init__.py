"""The attack stage: recordings, the threat model and attacks; neither Flower nor any data set."""
