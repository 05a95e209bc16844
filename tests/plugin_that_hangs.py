"""A plugin whose import never ends; for one test, as the import cannot be tried twice."""

from virtual_time import hang

hang()
