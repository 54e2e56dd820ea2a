"""Images whose update matches the observed one."""
