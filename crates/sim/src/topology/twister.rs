//! The Mersenne Twister MT19937, seeded and read as Python's `random.Random(seed)` does: the reference streams
//! were drawn with it, and come out again number by number.

/// A sequence of draws.
#[derive(Clone, Debug)]
pub(super) struct Twister {
    words: [u32; WORDS],
    next: usize,
}

const WORDS: usize = 624;
const SHIFT: usize = 397;
const UPPER_BIT: u32 = 0x8000_0000;

impl Twister {
    /// The sequence of a seed.
    #[must_use]
    pub(super) fn new(seed: u32) -> Self {
        let mixed = |word: u32| word ^ (word >> 30);
        let mut words = [19_650_218_u32; WORDS];
        for (number, at) in (1_u32..).zip(1..WORDS) {
            words[at] = 1_812_433_253_u32.wrapping_mul(mixed(words[at - 1])).wrapping_add(number);
        }
        // The seed is a key of one word, so every round adds the same.
        let mut positions = (1..WORDS).cycle();
        for at in positions.by_ref().take(WORDS) {
            words[at] = (words[at] ^ mixed(words[at - 1]).wrapping_mul(1_664_525)).wrapping_add(seed);
            carry(&mut words, at);
        }
        for at in positions.take(WORDS - 1) {
            let number = u32::try_from(at).unwrap_or(0);
            words[at] = (words[at] ^ mixed(words[at - 1]).wrapping_mul(1_566_083_941)).wrapping_sub(number);
            carry(&mut words, at);
        }
        words[0] = UPPER_BIT;
        Self { words, next: WORDS }
    }

    fn word(&mut self) -> u32 {
        if self.next == WORDS {
            self.twist();
            self.next = 0;
        }
        let mut word = self.words[self.next];
        self.next += 1;
        word ^= word >> 11;
        word ^= (word << 7) & 0x9d2c_5680;
        word ^= (word << 15) & 0xefc6_0000;
        word ^ (word >> 18)
    }

    fn twist(&mut self) {
        for at in 0..WORDS {
            let pair = (self.words[at] & UPPER_BIT) | (self.words[(at + 1) % WORDS] & !UPPER_BIT);
            let odd = if pair & 1 == 1 { 0x9908_b0df } else { 0 };
            self.words[at] = self.words[(at + SHIFT) % WORDS] ^ (pair >> 1) ^ odd;
        }
    }

    /// A number from 0 up to 1, as `random()`.
    pub(super) fn unit(&mut self) -> f64 {
        let (high, low) = (f64::from(self.word() >> 5), f64::from(self.word() >> 6));
        (high * f64::from(1_u32 << 26) + low) / (2.0_f64).powi(53)
    }

    /// A number below `limit`, which is above 0, as `randrange(limit)`: draws of just enough bits until one fits.
    pub(super) fn below(&mut self, limit: u32) -> u32 {
        loop {
            let drawn = self.word() >> limit.leading_zeros();
            if drawn < limit.max(1) {
                return drawn;
            }
        }
    }

    /// A number from `least` to `most`, as `randint(least, most)`.
    pub(super) fn between(&mut self, least: u32, most: u32) -> u32 {
        least + self.below(most - least + 1)
    }
}

/// The first word repeats the last one at the end of a round.
fn carry(words: &mut [u32; WORDS], at: usize) {
    if at == WORDS - 1 {
        words[0] = words[at];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_what_python_draws() {
        // random.Random(0): random(), random(), then randint(2, 5) and randint(5, 24) five times.
        let mut draws = Twister::new(0);
        assert_eq!([draws.unit(), draws.unit()].map(|unit| format!("{unit:.16}")), UNITS);
        let pairs: Vec<_> = (0..5).map(|_| (draws.between(2, 5), draws.between(5, 24))).collect();
        assert_eq!(pairs, PAIRS);
        let mut draws = Twister::new(4_000_000_000);
        assert_eq!((0..4).map(|_| draws.below(1000)).collect::<Vec<_>>(), OF_A_LARGE_SEED);
    }

    const UNITS: [&str; 2] = ["0.8444218515250481", "0.7579544029403025"];
    const PAIRS: [(u32, u32); 5] = [(5, 6), (4, 21), (5, 17), (4, 20), (4, 23)];
    const OF_A_LARGE_SEED: [u32; 4] = [419, 672, 185, 974];
}
