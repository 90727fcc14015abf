"""``headway compare``: what differs between runs."""
