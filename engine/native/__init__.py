"""The forward pass in C++: built at install where there is a compiler; torch does it where there is none."""
