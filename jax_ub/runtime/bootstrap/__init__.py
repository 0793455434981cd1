"""How the processes of a mesh find each other and agree before anyone goes on."""
