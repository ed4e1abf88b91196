//! The order of arriving pods and of nodes, for one seed.

use super::pod::SimPod;

/// Random draws that are the same on every host and in every version, so that results stay
/// comparable. The generator is SplitMix64.
#[derive(Clone, Debug)]
pub(super) struct Draws(u64);

impl Draws {
    /// Starts the sequence of a seed.
    #[must_use]
    pub(super) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0xD1B5_4A32_D192_ED03)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        bits ^ (bits >> 31)
    }

    /// Draws a number below `limit`; all numbers are equally likely. Returns 0 if `limit` is 0.
    pub(super) fn below(&mut self, limit: usize) -> usize {
        let scaled = (u128::from(self.next()) * limit as u128) >> 64;
        usize::try_from(scaled).unwrap_or(0)
    }

    /// Draws a number above 0 and at most 1.
    fn unit(&mut self) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "53 bits fit")]
        let number = ((self.next() >> 11) + 1) as f64;
        number / (1u64 << 53) as f64
    }

    /// Draws from the exponential distribution with mean 1.
    pub(super) fn exponential(&mut self) -> f64 {
        -self.unit().ln()
    }

    /// Draws from the normal distribution with mean 0 and variance 1, by the method of Box and
    /// Muller.
    pub(super) fn normal(&mut self) -> f64 {
        let radius = (2.0 * self.exponential()).sqrt();
        radius * (std::f64::consts::TAU * self.unit()).cos()
    }

    /// Shuffles the items; all orders are equally likely.
    pub(super) fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }
}

/// Returns the pods in the order of their arrival.
///
/// Together they request `fill` times the GPUs of the cluster. If the list requests less, pods are
/// drawn from it again; if it requests more, pods are left out. The same draws later order the
/// nodes.
pub(super) fn arrivals<'a>(
    pods: &'a [SimPod],
    gpu_count: usize,
    fill: f64,
    draws: &mut Draws,
) -> Vec<&'a SimPod> {
    #[expect(clippy::cast_precision_loss, reason = "a cluster has fewer than 2^52 GPUs")]
    let mark = 100.0 * gpu_count as f64 * fill;
    let mut order: Vec<&SimPod> = pods.iter().collect();
    draws.shuffle(&mut order);
    let mut asked: u64 = order.iter().map(|pod| u64::from(pod.percent)).sum();
    #[expect(clippy::cast_precision_loss, reason = "a cluster has fewer than 2^52 GPUs")]
    let passes = |asked: u64| asked as f64 > mark;
    if passes(asked) {
        while passes(asked) {
            let left_out = order.remove(draws.below(order.len()));
            asked -= u64::from(left_out.percent);
        }
        return order;
    }
    // A list without GPU requests would never reach the mark.
    if asked == 0 {
        return order;
    }
    loop {
        let pod = &pods[draws.below(pods.len())];
        // The published experiment counts one GPU of the candidate only, so the last pod may exceed
        // the mark.
        if passes(asked + u64::from(pod.percent.min(100))) {
            return order;
        }
        asked += u64::from(pod.percent);
        order.push(pod);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::trace;

    fn workload(pods: usize) -> Vec<SimPod> {
        let rows: String =
            (0..pods).map(|number| format!("p{number},1000,1,1,{}\n", 500 + number % 2 * 500)).collect();
        trace::pods(&format!("name,cpu_milli,memory_mib,num_gpu,gpu_milli\n{rows}")).unwrap()
    }

    fn asked(order: &[&SimPod]) -> u32 {
        order.iter().map(|pod| pod.percent).sum()
    }

    #[test]
    fn draws_pods_again_or_leaves_pods_out_to_reach_the_mark() {
        let pods = workload(10);
        let more = arrivals(&pods, 20, 1.3, &mut Draws::new(42));
        assert!((2500..=2600).contains(&asked(&more)), "{}", asked(&more));
        let fewer = arrivals(&pods, 4, 1.3, &mut Draws::new(42));
        assert!((420..=520).contains(&asked(&fewer)), "{}", asked(&fewer));
    }

    #[test]
    fn a_seed_always_gives_the_same_order() {
        let names = |seed| {
            let pods = workload(50);
            let order = arrivals(&pods, 100, 1.3, &mut Draws::new(seed));
            order.iter().map(|pod| pod.name.clone()).collect::<Vec<_>>()
        };
        assert_eq!(names(42), names(42));
        assert_ne!(names(42), names(43));
    }

    #[test]
    fn a_workload_without_gpus_terminates() {
        let pods = trace::pods("name,cpu_milli,memory_mib,num_gpu,gpu_milli\na,1,1,0,0\n").unwrap();
        assert_eq!(arrivals(&pods, 10, 1.3, &mut Draws::new(1)).len(), 1);
        assert!(arrivals(&[], 10, 1.3, &mut Draws::new(1)).is_empty());
    }
}
