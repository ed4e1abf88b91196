//! Divides the memory of a GPU that no pod was granted among the containers that may borrow it.

use tessera_core::units::MiB;

/// A container that may borrow memory of a GPU. All amounts are beyond what the container was granted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Share {
    /// Most that the container may borrow.
    pub(super) headroom: MiB,
    /// What the container may borrow now.
    pub(super) loan: MiB,
    /// What the container was last seen to use.
    pub(super) used: MiB,
}

impl Share {
    /// Returns what counts as borrowed: the loan, or the use where that is more.
    fn current(self) -> MiB {
        self.loan.max(self.used()).min(self.headroom)
    }

    /// Returns the borrowed memory in use, as far as it can be a loan.
    fn used(self) -> MiB {
        self.used.min(self.headroom)
    }
}

/// Returns the new loans of all containers, of which the sum is at most `pool`.
///
/// While there is enough, every container keeps its loan, and what is left is divided evenly if `may_raise`. If
/// there is too little, loans that are not in use end first.
pub(super) fn divide(pool: MiB, shares: &[Share], may_raise: bool) -> Vec<MiB> {
    let current: Vec<MiB> = shares.iter().map(|share| share.current()).collect();
    let used: Vec<MiB> = shares.iter().map(|share| share.used()).collect();
    let left = |given: &[MiB]| pool.0.checked_sub(sum(given));
    if let Some(left) = left(&current) {
        let wants =
            shares.iter().zip(&current).map(|(share, current)| share.headroom.saturating_sub(*current));
        let more = if may_raise { left } else { 0 };
        return add(&current, &fill(more, &wants.collect::<Vec<_>>()));
    }
    if let Some(left) = left(&used) {
        let wants = current.iter().zip(&used).map(|(current, used)| current.saturating_sub(*used));
        return add(&used, &fill(left, &wants.collect::<Vec<_>>()));
    }
    fill(pool.0, &used)
}

/// Returns the sum in MiB.
pub(super) fn sum(amounts: &[MiB]) -> u64 {
    amounts.iter().fold(0, |sum, amount| sum.saturating_add(amount.0))
}

fn add(first: &[MiB], second: &[MiB]) -> Vec<MiB> {
    first.iter().zip(second).map(|(first, second)| *first + *second).collect()
}

/// Divides an amount in MiB evenly, without giving any container more than it wants.
fn fill(mut amount: u64, wants: &[MiB]) -> Vec<MiB> {
    let mut order: Vec<usize> = (0..wants.len()).collect();
    order.sort_by_key(|&place| wants[place]);
    let mut given = vec![MiB::ZERO; wants.len()];
    for (done, place) in order.into_iter().enumerate() {
        let even_part = amount / (wants.len() - done) as u64;
        given[place] = wants[place].min(MiB(even_part));
        amount -= given[place].0;
    }
    given
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn share(headroom: u64, loan: u64, used: u64) -> Share {
        Share { headroom: MiB(headroom), loan: MiB(loan), used: MiB(used) }
    }

    fn check(pool: u64, shares: &[Share], may_raise: bool, expected: &[u64]) {
        let loans: Vec<u64> = divide(MiB(pool), shares, may_raise).iter().map(|loan| loan.0).collect();
        assert_eq!(loans, expected, "{pool} {shares:?} {may_raise}");
    }

    #[test]
    fn what_is_free_is_divided_evenly_and_unused_loans_end_first() {
        check(10, &[share(8, 0, 0)], true, &[8]);
        check(10, &[share(8, 0, 0), share(3, 0, 0)], true, &[7, 3]);
        check(10, &[share(8, 8, 0), share(8, 0, 0)], true, &[8, 2]);
        check(10, &[share(8, 8, 0), share(8, 0, 0)], false, &[8, 0]);
        // A pod was granted 6: what is not in use goes first, then as much as is missing.
        check(4, &[share(8, 8, 3), share(8, 2, 0)], true, &[4, 0]);
        check(5, &[share(8, 8, 3), share(8, 2, 0)], true, &[4, 1]);
        check(4, &[share(8, 8, 8), share(8, 2, 0)], true, &[4, 0]);
        check(0, &[share(8, 8, 8)], true, &[0]);
        // It still holds what it must return, and gets it back when the other pod ends first.
        check(8, &[share(8, 0, 8)], false, &[8]);
        check(8, &[share(2, 8, 8)], true, &[2]);
    }

    proptest! {
        #[test]
        fn never_lends_more_than_there_is_and_never_takes_without_need(
            pool in 0u64..200,
            amounts in proptest::collection::vec((0u64..60, 0u64..60, 0u64..80), 0..6),
            may_raise in any::<bool>(),
        ) {
            let shares: Vec<Share> = amounts.iter().map(|&(headroom, loan, used)| share(headroom, loan, used)).collect();
            let loans = divide(MiB(pool), &shares, may_raise);
            prop_assert!(sum(&loans) <= pool);
            let current = sum(&shares.iter().map(|share| share.current()).collect::<Vec<_>>());
            let used = sum(&shares.iter().map(|share| share.used()).collect::<Vec<_>>());
            for (share, loan) in shares.iter().zip(&loans) {
                prop_assert!(*loan <= share.headroom);
                // A loan grows beyond what the container already uses only if that is allowed.
                prop_assert!(may_raise || *loan <= share.loan.max(share.used));
                if current <= pool {
                    prop_assert!(*loan >= share.loan.min(share.headroom), "taken without need");
                }
                if used <= pool {
                    prop_assert!(*loan >= share.used(), "memory in use was taken before unused memory");
                }
            }
            // All that is free is lent.
            if may_raise {
                let wanted = sum(&shares.iter().map(|share| share.headroom).collect::<Vec<_>>());
                prop_assert!(used > pool || sum(&loans) == pool.min(wanted));
            }
            // The same again changes nothing, so limits are not written for nothing.
            let again: Vec<Share> = shares.iter().zip(&loans).map(|(share, loan)| Share { loan: *loan, ..*share }).collect();
            prop_assert_eq!(divide(MiB(pool), &again, may_raise), loans);
        }
    }
}
