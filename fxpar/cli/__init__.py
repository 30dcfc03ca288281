"""The command line: one file per subcommand, `main` joins them."""
