//! Random draws as Python's `random.Random(seed)` makes them.
//!
//! The reference streams were drawn with Python, so this type must repeat its draws exactly. The
//! generator itself is MT19937 of the crate `rand_mt`.

use rand_mt::Mt;

/// A sequence of draws.
#[derive(Clone, Debug)]
pub(super) struct Twister(Mt);

impl Twister {
    /// Starts the sequence of a seed. Python seeds the generator with a key of one word.
    #[must_use]
    pub(super) fn new(seed: u32) -> Self {
        Self(Mt::new_with_key([seed]))
    }

    /// Draws a number in `0.0..1.0`, like `random()`.
    pub(super) fn unit(&mut self) -> f64 {
        let (high, low) = (f64::from(self.0.next_u32() >> 5), f64::from(self.0.next_u32() >> 6));
        (high * f64::from(1_u32 << 26) + low) / (2.0_f64).powi(53)
    }

    /// Draws a number below `limit`, like `randrange(limit)`: draws as many bits as `limit` has
    /// until they fit. `limit` must be above 0.
    pub(super) fn below(&mut self, limit: u32) -> u32 {
        loop {
            let drawn = self.0.next_u32() >> limit.leading_zeros();
            if drawn < limit.max(1) {
                return drawn;
            }
        }
    }

    /// Draws a number in `min..=max`, like `randint(min, max)`.
    pub(super) fn between(&mut self, min: u32, max: u32) -> u32 {
        min + self.below(max - min + 1)
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

    /// `random.Random(seed).getrandbits(32)`: the first five words of a seed, then words 624 and
    /// 1248, the first ones after the state was generated anew.
    #[test]
    fn words_equal_those_of_the_reference_implementation() {
        for (seed, first, later) in WORDS {
            let Twister(mut words) = Twister::new(seed);
            let drawn: Vec<u32> = (0..1249).map(|_| words.next_u32()).collect();
            assert_eq!((drawn[..5].to_vec(), [drawn[624], drawn[1248]]), (first.to_vec(), later), "{seed}");
        }
    }

    const WORDS: [(u32, [u32; 5], [u32; 2]); 3] = [
        (
            0,
            [3_626_764_237, 1_654_615_998, 3_255_389_356, 3_823_568_514, 1_806_341_205],
            [2_229_104_038, 2_465_233_080],
        ),
        (
            1,
            [577_090_037, 2_444_712_010, 3_639_700_191, 3_445_702_192, 3_280_387_012],
            [1_360_367_077, 1_032_912_167],
        ),
        (
            4_294_967_295,
            [2_728_839_433, 2_661_025_012, 872_737_089, 924_893_097, 2_608_619_700],
            [2_143_983_266, 900_933_221],
        ),
    ];
}
