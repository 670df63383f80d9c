"""Who gets how much of a server before and while a request is answered: connections, places, memory, time."""
