"""The web page: its files, and the JSON it is drawn from."""
