"""``headway show``: the query and the printer."""
