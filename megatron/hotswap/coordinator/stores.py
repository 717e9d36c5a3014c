JOURNAL = "journal"
