"""A plugin whose requirement is missing: it must stop only the scenario that names it."""

import a_module_that_is_not_installed  # type: ignore[import-not-found]  # noqa: F401
