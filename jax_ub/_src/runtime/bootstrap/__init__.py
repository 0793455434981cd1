"""Bootstrap: the processes of a mesh find each other and exchange values."""
