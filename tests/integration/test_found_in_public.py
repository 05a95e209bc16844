"""Public reports: the smallest input of each, which release 0.1.0 trained or exported wrongly.

A test bears the tracker and the number of its report. Relatives of each kind are tested
beside the code.
"""

# Rows and templates.


# Files and columns.


# Models.


# Exports.
