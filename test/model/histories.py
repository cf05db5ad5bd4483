def run(seed, seconds):
    return True
