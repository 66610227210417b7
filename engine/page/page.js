// The page of a server: see index.html.
