"""Images out of an imprint module's gradient."""
