"""AWD-LSTM on WikiText-2. Read `task` first."""
