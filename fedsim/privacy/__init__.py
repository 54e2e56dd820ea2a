"""What a stack guarantees: its ledger, and exact privacy curves of mechanisms."""
