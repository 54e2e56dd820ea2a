"""A federation of many processes and machines: certificates, a gate, an eavesdropper."""
