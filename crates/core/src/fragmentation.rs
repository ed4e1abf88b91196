//! How much of what is idle on a node is of no use to the pods that come.
//!
//! The measure of Weng et al., "Beware of Fragmentation" (USENIX ATC 2023): for each kind of pod, the idle parts of
//! GPUs that cannot serve it; all idle parts where the node cannot serve it at all; weighted by how often the kind
//! comes. Tables by CPU make one node cost one step per GPU, whatever the number of kinds.

use crate::gpu::GpuKind;
use crate::gpu_set::GpuSet;
use crate::units::MilliCpu;
use crate::workload::PodClass;

/// The measure for nodes with GPUs of one kind.
#[derive(Clone, Debug, Default)]
pub struct Fragmentation {
    /// Distinct CPU demands, ascending.
    levels: Vec<MilliCpu>,
    /// For CPU below the first level, from the first on, from the second on, ...
    rows: Vec<Row>,
}

/// Weights of the kinds of pods that a node with enough CPU for them could serve.
#[derive(Clone, Debug)]
struct Row {
    /// Of one GPU, by percent left on the best: those that fit.
    single: [f64; 101],
    /// Of several GPUs, by number of whole GPUs left: those that fit.
    several: [f64; GpuSet::CAPACITY + 1],
}

impl Fragmentation {
    /// The measure against these kinds with their weights. Weights that add up to less than 1 leave the rest to pods
    /// that no node can serve, such as those without GPUs.
    pub fn new<'a>(classes: impl Iterator<Item = (&'a PodClass, f64)>, kind: &GpuKind) -> Self {
        let fitting =
            classes.filter(|(class, _)| class.accepts(&kind.model) && class.percent_of(kind) <= 100);
        let mut fitting: Vec<(&PodClass, f64)> = fitting.collect();
        fitting.sort_by_key(|(class, _)| class.cpu);
        let mut levels = Vec::new();
        let mut rows = vec![Row { single: [0.0; 101], several: [0.0; GpuSet::CAPACITY + 1] }];
        for (class, weight) in fitting {
            if levels.last() != Some(&class.cpu) {
                levels.push(class.cpu);
                rows.extend(rows.last().cloned());
            }
            if let Some(row) = rows.last_mut() {
                row.add(class, kind, weight);
            }
        }
        Self { levels, rows }
    }

    /// The expected useless part of a node's GPUs, in GPUs; `left` tells the percent left of each.
    pub fn of(&self, cpu_left: MilliCpu, left: impl Iterator<Item = u8> + Clone) -> f64 {
        let Some(row) = self.rows.get(self.levels.partition_point(|level| *level <= cpu_left)) else {
            return 0.0;
        };
        let (mut best, mut whole, mut parts, mut total) = (0u8, 0usize, 0u32, 0u32);
        for percent in left.clone() {
            best = best.max(percent);
            total += u32::from(percent);
            if percent >= 100 {
                whole += 1;
            } else {
                parts += u32::from(percent);
            }
        }
        let single = row.single[usize::from(best.min(100))];
        let several = row.several[whole.min(GpuSet::CAPACITY)];
        // Nobody who fits nowhere can use anything; who takes whole GPUs cannot use parts; who takes a part cannot use
        // a smaller one.
        let mut useless = f64::from(total) * (1.0 - single - several) + f64::from(parts) * several;
        for percent in left.filter(|percent| *percent < best) {
            useless += f64::from(percent) * (single - row.single[usize::from(percent)]);
        }
        useless / 100.0
    }
}

impl Row {
    fn add(&mut self, class: &PodClass, kind: &GpuKind, weight: f64) {
        if class.gpu_count() == 1 {
            let needed = class.percent_of(kind).min(100);
            self.single[needed..].iter_mut().for_each(|sum| *sum += weight);
        } else {
            let needed = class.gpu_count().min(GpuSet::CAPACITY);
            self.several[needed..].iter_mut().for_each(|sum| *sum += weight);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::units::{MiB, Percent};
    use crate::workload::Demand;

    /// The definition, kind by kind.
    fn by_definition(classes: &[(PodClass, f64)], cpu_left: MilliCpu, left: &[u8]) -> f64 {
        let mut sum = 0.0;
        for (class, weight) in classes {
            let needed = match class.demand {
                Demand::Share { compute_percent, .. } => compute_percent.0,
                Demand::Whole(_) => 100,
            };
            let too_small = |percent: &&u8| u32::from(**percent) < needed;
            let enough = left.iter().filter(|percent| !too_small(percent)).count();
            let fits = class.cpu <= cpu_left && enough >= class.gpu_count();
            let useless: u32 = left
                .iter()
                .filter(|percent| !fits || too_small(percent))
                .map(|percent| u32::from(*percent))
                .sum();
            sum += weight * f64::from(useless) / 100.0;
        }
        sum
    }

    fn class() -> impl Strategy<Value = PodClass> {
        let demand = prop_oneof![
            (1u32..100).prop_map(|compute_percent| Demand::Share {
                compute_percent: Percent(compute_percent),
                memory: MiB(0)
            }),
            (1u8..9).prop_map(Demand::Whole),
        ];
        (0u64..5, demand).prop_map(|(cpu, demand)| PodClass { cpu: MilliCpu(cpu), demand, models: vec![] })
    }

    proptest! {
        #[test]
        fn tables_agree_with_the_definition(
            classes in prop::collection::vec(class(), 1..12),
            left in prop::collection::vec(prop_oneof![Just(0u8), Just(100), 0u8..=100], 0..9),
            cpu in 0u64..6,
        ) {
            let weight = 1.0 / classes.len() as f64;
            let classes: Vec<(PodClass, f64)> = classes.into_iter().map(|class| (class, weight)).collect();
            let kind = GpuKind::new("T4".into(), MiB(100));
            let measure = Fragmentation::new(classes.iter().map(|(class, weight)| (class, *weight)), &kind);
            let cpu = MilliCpu(cpu);
            let expected = by_definition(&classes, cpu, &left);
            prop_assert!((measure.of(cpu, left.iter().copied()) - expected).abs() < 1e-9);
        }
    }
}
