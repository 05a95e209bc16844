"""One case per public report: the smallest input that once trained or exported something else.

Each test is named by the tracker and the number of its report. Relatives of each kind are tested
beside the code.
"""

# Rows and templates.


# Files and columns.


# Models.


# Exports.
