"""Published claims about attention, tested on the runs of a sweep."""
