"""The checks of `stepwire doctor`. Each one is quick, starts nothing and changes nothing."""
