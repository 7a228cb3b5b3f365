"""How Inductor lowers our operators: opaque calls, in place where nothing reads later, launches in packages."""
