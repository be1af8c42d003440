"""What one planet more is worth, by density ratios from a Markov chain of its own: an oracle of ``evidence_exam``.

    python -m benchmarks.velocity_ratios SERIES NUMBER [PARTICLES ROUNDS SEED]

A planet of no amplitude is none, and all other priors stay, so that the evidence with ``NUMBER`` planets over that
without the last is the prior density of its amplitude over the posterior density, both at zero; Dickey (1971).  The
amplitude's score is uniform a priori.  The sampler is numpy alone, and knows the model: it moves one planet at a time,
draws single coordinates anew, trades phase against argument and against period, and exchanges the first two planets
where their periods allow it.  Printed are the density of each planet's score in bins near zero, and the share of
particles in which the first planet's amplitude is below the second's.  Of series 1, third planet, it is .25 nats off
what is known: so good is one run of the default size.
"""

import math
import os
import sys
from pathlib import Path

import numpy as np

from benchmarks.evidence_exam import BOUNDS

Array = np.ndarray
TURN = math.tau
WITHIN = -math.expm1(-1.0 / (2.0 * 0.04))  # of the Rayleigh density of eccentricities, below one
ANGLES = np.array([False, False, False, True, True])  # of a planet's period, amplitude, eccentricity, argument, phase
BINS = np.array([0.0, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08])
KEPT = 0.8  # effective share of particles that a power leaves


class Velocities:
    """The likelihood of one series, in coordinates where its correlated noise is independent."""

    def __init__(self, series: int, number: int) -> None:
        path = Path(os.environ["PYRO_EVIDENCE_DATA"]) / f"velocities_{series}.csv"
        self.days, velocity, error = np.loadtxt(path, delimiter=",", skiprows=1).T
        apart = self.days[:, None] - self.days
        noise = 3.0 * np.exp(-0.5 * (np.sin(math.pi * apart / 20.0) ** 2 / 0.25 + apart**2 / 2500.0))
        self.variance, self.turn = np.linalg.eigh(noise + np.diag(error**2))
        self.bounds, self.velocity, self.level = BOUNDS[series][:number], velocity @ self.turn, self.turn.sum(0)

    def period(self, score: Array, k: int) -> Array:
        low, high = self.bounds[k]
        return low * (high / low) ** score

    def score(self, period: Array, k: int) -> Array:
        low, high = self.bounds[k]
        return np.log(period / low) / math.log(high / low)

    def curve(self, q: Array, k: int) -> Array:
        """The curve of planet ``k`` at scores ``(N, 5)``, ``(N, days)``."""
        period, (amplitude, spread) = self.period(q[:, :1], k), (q[:, 1:2], q[:, 2:3])
        e = 0.2 * np.sqrt(-2.0 * np.log1p(-WITHIN * spread))
        mean = np.mod(TURN * (self.days / period + q[:, 4:5]), TURN)
        E = mean + 0.85 * e * np.sign(np.sin(mean))  # Danby (1987)
        for _ in range(12):
            off, rate = E - e * np.sin(E) - mean, 1.0 - e * np.cos(E)
            step = off / (rate - 0.5 * off * e * np.sin(E) / rate)
            E = E - step
            if np.abs(step).max() < 1e-8:
                break
        cos, sin = (np.cos(E) - e) / (1.0 - e * np.cos(E)), np.sqrt(1.0 - e * e) * np.sin(E) / (1.0 - e * np.cos(E))
        omega = TURN * q[:, 3:4]
        return (np.expm1(amplitude * math.log1p(999.0)) * ((cos + e) * np.cos(omega) - sin * np.sin(omega))) @ self.turn

    def log_likelihood(self, total: Array, shared: Array) -> Array:
        """Of summed curves ``(N, days)``, and scores of jitter and level ``(N, 2)``, nats."""
        variance = self.variance + np.expm1(shared[:, :1] * math.log1p(99.0)) ** 2
        left = total + (2000.0 * shared[:, 1:] - 1000.0) * self.level - self.velocity
        return -0.5 * (left**2 / variance + np.log(TURN * variance)).sum(1)


def folded(x: Array, angles: Array | bool) -> Array:
    """Into the unit cube: angles go round, others are reflected."""
    return np.where(angles, np.mod(x, 1.0), np.abs(np.mod(x + 1.0, 2.0) - 1.0))


class Particles:
    """Scores of jitter and level ``(N, 2)`` and of planets ``(N, K, 5)``, their curves, and their log likelihoods."""

    def __init__(self, data: Velocities, num: int, rng: np.random.Generator) -> None:
        self.data, self.num, self.rng = data, num, rng
        self.shared, self.q = rng.random((num, 2)), rng.random((num, len(data.bounds), 5))
        self.curves = np.stack([data.curve(self.q[:, k], k) for k in range(len(data.bounds))], 1)
        self.height = data.log_likelihood(self.curves.sum(1), self.shared)

    def pairs(self) -> tuple[Array, Array]:
        """Two others for each."""
        return tuple((np.arange(self.num) + self.rng.integers(1, self.num, self.num)) % self.num for _ in range(2))

    def accepted(self, there: Array, power: float) -> Array:
        return np.log(self.rng.random(self.num)) < power * (there - self.height)

    def resample(self, weights: Array) -> None:
        places = (np.arange(self.num) + self.rng.random()) / self.num
        i = np.searchsorted(np.cumsum(weights / weights.sum()), places).clip(0, self.num - 1)
        self.rng.shuffle(i)
        self.shared, self.q, self.curves, self.height = self.shared[i], self.q[i], self.curves[i], self.height[i]

    def proposed(self, k: int) -> Array:
        """Scores of planet ``k`` by one of six symmetric moves."""
        rng, x, (a, b) = self.rng, self.q[:, k].copy(), self.pairs()
        apart, kind, size = self.q[a, k] - self.q[b, k], rng.choice(6, p=[0.35, 0.2, 0.1, 0.15, 0.1, 0.1]), x.shape
        apart[:, 3:] = (apart[:, 3:] + 0.5) % 1.0 - 0.5
        if kind == 0:
            length = rng.choice([2.38 / 10.0**0.5, 0.5, 0.15, 0.05], self.num)[:, None]
            x += length * apart + 1e-5 * rng.normal(size=size)
        elif kind == 1:
            length = rng.choice([1.0, 0.4, 0.1], self.num)[:, None]
            x += (rng.random(size) < 0.4) * (length * apart + 1e-5 * rng.normal(size=size))
        elif kind == 2:
            x = rng.random(size)
        elif kind == 3:
            x[np.arange(self.num), rng.integers(0, 5, self.num)] = rng.random(self.num)
        elif kind == 4:
            move = rng.choice([0.5, 0.1, 0.02], self.num) * rng.normal(size=self.num)
            x[:, 3:] += move[:, None] * np.array([1.0, -1.0])
        else:
            before, day = self.data.period(x[:, 0], k), rng.choice(self.data.days, self.num)
            x[:, 0] = folded(x[:, 0] + rng.choice([0.3, 0.05, 0.01], self.num) * rng.normal(size=self.num), False)
            x[:, 4] += day / before - day / self.data.period(x[:, 0], k)
        return folded(x, ANGLES)

    def move(self, power: float) -> None:
        """One round: each planet twice, jitter and level, and an exchange of the first two planets."""
        data, rng = self.data, self.rng
        for k in [*range(len(data.bounds))] * 2:
            x = self.proposed(k)
            curve = data.curve(x, k)
            there = data.log_likelihood(self.curves.sum(1) - self.curves[:, k] + curve, self.shared)
            yes = self.accepted(there, power)
            self.q[yes, k], self.curves[yes, k], self.height[yes] = x[yes], curve[yes], there[yes]
        a, b = self.pairs()
        length, some = rng.choice([1.0, 0.4, 0.1], self.num)[:, None], rng.random((self.num, 2)) < 0.7
        x = folded(self.shared + length * some * (self.shared[a] - self.shared[b]), False)
        x = folded(x + 1e-6 * rng.normal(size=x.shape), False)
        there = data.log_likelihood(self.curves.sum(1), x)
        yes = self.accepted(there, power)
        self.shared[yes], self.height[yes] = x[yes], there[yes]
        if len(data.bounds) > 1:  # the curves change places: nothing else changes, and periods are uniform in logs
            first, second = (data.score(data.period(self.q[:, 1 - k, 0], 1 - k), k) for k in (0, 1))
            yes = (np.abs(first - 0.5) <= 0.5) & (np.abs(second - 0.5) <= 0.5) & (rng.random(self.num) < 0.5)
            self.q[yes, :2], self.curves[yes, :2] = self.q[yes, 1::-1], self.curves[yes, 1::-1]
            self.q[yes, 0, 0], self.q[yes, 1, 0] = first[yes], second[yes]


def next_step(height: Array, left: float) -> float:
    """By how much the power grows, at most ``left``, for a share of the particles to be left."""

    def share(step: float) -> float:
        weights = np.exp(step * (height - height.max()))
        return float(weights.sum() ** 2 / (weights**2).sum() / len(weights))

    low, high = 0.0, left
    for _ in range(40 if share(left) < KEPT else 0):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if share(middle) >= KEPT else (low, middle)
    return low or left


def main(series: int, number: int, num: int = 1500, rounds: int = 300, seed: int = 1) -> None:
    """Particles from the prior to the posterior, and densities of amplitudes' scores from there."""
    particles, power = Particles(Velocities(series, number), num, np.random.default_rng(seed)), 0.0
    while power < 1.0:
        step = next_step(particles.height, 1.0 - power)
        particles.resample(np.exp(step * (particles.height - particles.height.max())))
        power = min(1.0, power + step)
        for _ in range(8):
            particles.move(power)
    counts, shares = np.zeros((number, len(BINS) - 1)), list[float]()
    for step in range(rounds):
        particles.move(1.0)
        if step >= rounds // 4:
            counts += np.stack([np.histogram(particles.q[:, k, 1], BINS)[0] for k in range(number)])
            shares.append(float((particles.q[:, 0, 1] < particles.q[:, min(1, number - 1), 1]).mean()))
    density = counts / (num * len(shares)) / np.diff(BINS)
    for k, row in enumerate(density):
        print(f"planet {k + 1}: density of its amplitude's score up to {BINS[1:].tolist()}: {row.round(2).tolist()}")
    ratio = -math.log(density[-1, 0]) if density[-1, 0] else math.inf
    print(f"log ratio of evidences by the first {ratio:.2f} nats; first amplitude below second {np.mean(shares):.2f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
