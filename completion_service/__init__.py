"""The completion service: takes prefilled sequences over and decodes them; as NORMAL it does both."""
