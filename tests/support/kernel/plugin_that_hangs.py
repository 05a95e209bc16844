"""A plugin whose import never ends; in a process one test may use it, as no second try begins."""

from support.kernel.virtual_time import hang

hang()
