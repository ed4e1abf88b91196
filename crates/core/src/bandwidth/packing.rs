//! The number of rings through the same GPUs that share no NVLink.

/// The NVLinks between the GPUs of one set, which are numbered from 0.
#[derive(Clone, Debug)]
pub(super) struct Wiring {
    size: usize,
    /// Row-major, symmetric.
    links: Vec<u8>,
}

/// Largest set for which the upper bound examines every cut; eight GPUs have 127 cuts.
const MAX_CUT_GPUS: usize = 8;

// === impl Wiring ===

impl Wiring {
    /// Creates the wiring of `size` GPUs, at least three.
    pub(super) fn of(size: usize, link: impl Fn(usize, usize) -> u8) -> Self {
        let pairs = (0..size * size).map(|pair| (pair / size, pair % size));
        let links = pairs.map(|(a, b)| if a == b { 0 } else { link(a, b) });
        Self { size, links: links.collect() }
    }

    /// Returns the largest number of rings through all GPUs that share no NVLink. The search ends
    /// after `steps` steps and returns the best number found.
    pub(super) fn most_rings(self, steps: u32) -> u32 {
        let bound = self.upper_bound();
        if bound == 0 {
            return 0;
        }
        let path = Vec::with_capacity(self.size);
        let mut packing = Packing { wiring: self, most: 0, bound, steps_left: steps, path };
        packing.start_ring(0, None);
        packing.most
    }

    fn row(&self, gpu: usize) -> &[u8] {
        &self.links[gpu * self.size..(gpu + 1) * self.size]
    }

    fn degree(&self, gpu: usize) -> u32 {
        self.row(gpu).iter().map(|links| u32::from(*links)).sum()
    }

    /// Returns an upper bound for the number of rings.
    fn upper_bound(&self) -> u32 {
        let gpus = 0..self.size;
        let at_a_gpu = gpus.clone().map(|gpu| {
            let degree = self.degree(gpu);
            let most_to_one = u32::from(self.row(gpu).iter().copied().max().unwrap_or(0));
            // A ring uses two links of each GPU, and they lead to different neighbours.
            (degree / 2).min(degree - most_to_one)
        });
        let all: u32 = gpus.map(|gpu| self.degree(gpu)).sum();
        #[expect(clippy::cast_possible_truncation, reason = "at most 64 GPUs")]
        let by_length = all / 2 / self.size as u32;
        let bound = at_a_gpu.min().unwrap_or(0).min(by_length);
        if self.size > MAX_CUT_GPUS || bound <= 1 {
            return bound;
        }
        // A ring that enters one side of a cut leaves it again.
        let sides = (1..1u32 << (self.size - 1)).map(|side| self.links_across(side) / 2);
        sides.fold(bound, u32::min)
    }

    fn links_across(&self, side: u32) -> u32 {
        let is_inside = |gpu: &usize| side & (1 << gpu) != 0;
        let inside = (0..self.size).filter(is_inside);
        let leaving = |gpu| {
            let outside = (0..self.size).filter(|other| !is_inside(other));
            outside.map(|other| u32::from(self.links[gpu * self.size + other])).sum::<u32>()
        };
        inside.map(leaving).sum()
    }

    fn has(&self, a: usize, b: usize) -> bool {
        self.links[a * self.size + b] > 0
    }

    /// Changes the number of links of every hop of a ring.
    fn change(&mut self, ring: &[usize], change: impl Fn(u8) -> u8) {
        for (position, a) in ring.iter().enumerate() {
            let b = ring[(position + 1) % ring.len()];
            let left = change(self.links[a * self.size + b]);
            self.links[a * self.size + b] = left;
            self.links[b * self.size + a] = left;
        }
    }
}

/// The search for rings. It adds them in ascending order, so that it meets every packing once.
struct Packing {
    /// The wiring without the links of the rings found so far.
    wiring: Wiring,
    most: u32,
    bound: u32,
    steps_left: u32,
    /// The ring under construction; it starts at GPU 0.
    path: Vec<usize>,
}

impl Packing {
    /// Starts the next ring after `found` others. The new ring is not below `floor`, the last of
    /// them.
    fn start_ring(&mut self, found: u32, floor: Option<&[usize]>) {
        let before = std::mem::replace(&mut self.path, vec![0]);
        self.extend(1, found, floor);
        self.path = before;
    }

    fn extend(&mut self, seen: u64, found: u32, floor: Option<&[usize]>) {
        if self.most >= self.bound || self.steps_left == 0 {
            return;
        }
        self.steps_left -= 1;
        let end = self.path[self.path.len() - 1];
        if self.path.len() == self.wiring.size {
            self.close(end, found);
            return;
        }
        let lowest = floor.map_or(1, |floor| floor[self.path.len()]);
        for gpu in lowest..self.wiring.size {
            if seen & (1 << gpu) != 0 || !self.wiring.has(end, gpu) {
                continue;
            }
            self.path.push(gpu);
            // After the first hop above the floor, every continuation is above it.
            self.extend(seen | 1 << gpu, found, floor.filter(|_| gpu == lowest));
            self.path.pop();
        }
    }

    fn close(&mut self, end: usize, found: u32) {
        // One of a ring's two directions is enough: the one that starts with the lower neighbour.
        if !self.wiring.has(end, 0) || self.path[1] > end {
            return;
        }
        let ring = self.path.clone();
        self.wiring.change(&ring, |links| links - 1);
        self.most = self.most.max(found + 1);
        let further = (0..self.wiring.size).map(|gpu| self.wiring.degree(gpu) / 2).min().unwrap_or(0);
        if found + 1 + further > self.most {
            self.start_ring(found + 1, Some(&ring));
        }
        self.wiring.change(&ring, |links| links + 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNLIMITED: u32 = u32::MAX;

    fn check(rows: &[&[u8]], expected: u32) {
        let wiring = Wiring::of(rows.len(), |a, b| rows[a][b]);
        assert_eq!(wiring.most_rings(UNLIMITED), expected, "{rows:?}");
    }

    #[test]
    fn counts_the_rings_of_known_wirings() {
        check(&[&[0, 1, 1], &[1, 0, 1], &[1, 1, 0]], 1);
        check(&[&[0, 2, 2], &[2, 0, 1], &[2, 1, 0]], 1);
        check(&[&[0, 1, 0], &[1, 0, 1], &[0, 1, 0]], 0);
        // Four GPUs, four NVLinks between any two.
        check(&[&[0, 4, 4, 4], &[4, 0, 4, 4], &[4, 4, 0, 4], &[4, 4, 4, 0]], 6);
    }

    /// Tries every ring of the wiring, each any number of times.
    fn exhaustive(wiring: &Wiring) -> u32 {
        fn rings(wiring: &Wiring, path: &mut Vec<usize>, found: &mut Vec<Vec<usize>>) {
            if path.len() == wiring.size {
                if path[1] < path[path.len() - 1] {
                    found.push(path.clone());
                }
                return;
            }
            for gpu in 1..wiring.size {
                if !path.contains(&gpu) {
                    path.push(gpu);
                    rings(wiring, path, found);
                    path.pop();
                }
            }
        }
        fn best(wiring: &mut Wiring, rings: &[Vec<usize>]) -> u32 {
            let Some((ring, others)) = rings.split_first() else { return 0 };
            let hops = ring.iter().zip(ring.iter().cycle().skip(1));
            let without = best(wiring, others);
            if hops.into_iter().any(|(a, b)| !wiring.has(*a, *b)) {
                return without;
            }
            wiring.change(ring, |links| links - 1);
            let with = 1 + best(wiring, rings);
            wiring.change(ring, |links| links + 1);
            with.max(without)
        }
        let mut found = Vec::new();
        rings(wiring, &mut vec![0], &mut found);
        best(&mut wiring.clone(), &found)
    }

    proptest::proptest! {
        #[test]
        fn agrees_with_trying_every_packing(
            size in 3usize..6,
            links in proptest::collection::vec(0u8..4, 25),
        ) {
            let wiring = Wiring::of(size, |a, b| links[a.min(b) * 5 + a.max(b)]);
            proptest::prop_assert_eq!(wiring.clone().most_rings(UNLIMITED), exhaustive(&wiring));
        }
    }
}
