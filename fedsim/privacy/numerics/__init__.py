"""The special functions, integrals and root finders that closed forms rest on."""
