"""The film: the plain client and specact side by side, and below them when the link was down and who stood still."""
FILMED = ("target", "adahi")
FILM_S = 10.5
class Film:
    def __init__(self, episode):
        pass
