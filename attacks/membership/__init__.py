"""Attacks on updates that say of given examples whether a client trained on them."""
