class Memory:
    tokens = None
    def search(self, feature, k): return self
