"""What every worker and the driver share: settings, plans, records, files, signals, ranks and devices."""
