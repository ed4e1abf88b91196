//! The search for a ring through all GPUs of a set.

use super::mask::{bits, index};

/// Returns for every set of at most 16 GPUs, by mask, whether a ring along `neighbours` runs
/// through all of it. A ring needs at least three GPUs.
///
/// The function handles all sets at once. It keeps the last GPUs of all paths that start at a set's
/// lowest GPU. The paths of a set are those of its subsets, one step longer.
pub(super) fn ringed_sets(neighbours: &[u64]) -> Vec<bool> {
    let sets = 1usize << neighbours.len();
    let mut path_ends = vec![0u64; sets];
    let mut ringed = vec![false; sets];
    for set in 1..sets as u64 {
        let lowest = set.trailing_zeros() as usize;
        let others = set & (set - 1);
        if others == 0 {
            path_ends[index(set)] = set;
            continue;
        }
        let reached = |gpu: &usize| path_ends[index(set & !(1 << gpu))] & neighbours[*gpu] != 0;
        let ends = bits(others).filter(reached).fold(0, |ends, gpu| ends | 1 << gpu);
        path_ends[index(set)] = ends;
        ringed[index(set)] = set.count_ones() > 2 && ends & neighbours[lowest] != 0;
    }
    ringed
}

/// Returns whether a ring along `neighbours` runs through all of `set`. The search returns `false`
/// after `steps` steps, so the bandwidth of large hosts may be underestimated.
pub(super) fn has_ring(neighbours: &[u64], set: u64, steps: u32) -> bool {
    let size = set.count_ones();
    let fewest = bits(set).map(|gpu| (neighbours[gpu] & set).count_ones()).min().unwrap_or(0);
    // Dirac's theorem: a ring exists where each GPU neighbours at least half of the set.
    if size < 3 || fewest * 2 >= size {
        return size >= 3;
    }
    if fewest < 2 || !is_connected(neighbours, set) {
        return false;
    }
    let start = set.trailing_zeros() as usize;
    let mut walk = Walk { neighbours, start, steps_left: steps };
    walk.closes(start, set & !(1 << start))
}

fn is_connected(neighbours: &[u64], set: u64) -> bool {
    let mut reached = set & set.wrapping_neg();
    loop {
        let further = bits(reached).fold(reached, |all, gpu| all | neighbours[gpu] & set);
        if further == reached {
            return reached == set;
        }
        reached = further;
    }
}

/// A path that the search extends to a ring.
struct Walk<'a> {
    neighbours: &'a [u64],
    start: usize,
    steps_left: u32,
}

impl Walk<'_> {
    /// Returns whether the path that ends at `end` can continue through all of `left` and back to
    /// the start.
    fn closes(&mut self, end: usize, left: u64) -> bool {
        let home = self.neighbours[self.start];
        if left == 0 {
            return home & (1 << end) != 0;
        }
        if self.steps_left == 0 || home & left == 0 {
            return false;
        }
        self.steps_left -= 1;
        // GPUs with the fewest onward links come first, because they become dead ends later.
        let mut next: Vec<usize> = bits(self.neighbours[end] & left).collect();
        next.sort_by_key(|gpu| (self.neighbours[*gpu] & left).count_ones());
        next.into_iter().any(|gpu| self.closes(gpu, left & !(1 << gpu)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNLIMITED: u32 = u32::MAX;

    /// Returns the neighbours that the pairs define.
    fn graph(count: usize, pairs: &[(usize, usize)]) -> Vec<u64> {
        let mut neighbours = vec![0; count];
        for (a, b) in pairs {
            neighbours[*a] |= 1 << b;
            neighbours[*b] |= 1 << a;
        }
        neighbours
    }

    fn check(count: usize, pairs: &[(usize, usize)], set: u64, expected: bool) {
        let graph = graph(count, pairs);
        assert_eq!(has_ring(&graph, set, UNLIMITED), expected, "{pairs:?}");
        assert_eq!(ringed_sets(&graph)[index(set)], expected, "{pairs:?}");
    }

    #[test]
    fn finds_rings_and_their_absence() {
        let square = [(0, 1), (1, 2), (2, 3), (3, 0)];
        check(4, &square, 0b1111, true);
        check(4, &square, 0b0111, false);
        check(4, &square, 0b0011, false);
        let bow_tie = [(0, 1), (1, 2), (2, 0), (2, 3), (3, 4), (4, 2)];
        check(5, &bow_tie, 0b11111, false);
        check(5, &bow_tie, 0b11100, true);
        let two_triangles = [(0, 1), (1, 2), (2, 0), (3, 4), (4, 5), (5, 3)];
        check(6, &two_triangles, 0b11_1111, false);
    }

    #[test]
    fn stops_after_the_step_limit() {
        let neighbours = graph(8, &[(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 7), (7, 0)]);
        assert!(has_ring(&neighbours, 0xff, UNLIMITED));
        assert!(!has_ring(&neighbours, 0xff, 3));
    }

    proptest::proptest! {
        #[test]
        fn the_search_and_the_table_agree(pairs in proptest::collection::vec((0usize..8, 0usize..8), 0..20)) {
            let pairs: Vec<_> = pairs.into_iter().filter(|(a, b)| a != b).collect();
            let graph = graph(8, &pairs);
            let ringed = ringed_sets(&graph);
            for set in 0..256 {
                proptest::prop_assert_eq!(has_ring(&graph, set, UNLIMITED), ringed[index(set)], "{:b}", set);
            }
        }
    }
}
