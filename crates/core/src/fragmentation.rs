//! Fragmentation: how much of a node's free GPU capacity the expected pods cannot use.
//!
//! The measure is that of Weng et al., "Beware of Fragmentation" (USENIX ATC 2023). For each class
//! of pods it counts the free parts of GPUs that cannot serve the class, or all free parts where
//! the node cannot serve it at all. Each class is weighted by its frequency. Tables by CPU make the
//! cost one step per GPU, whatever the number of classes.

use crate::gpu::GpuKind;
use crate::gpu_set::GpuSet;
use crate::units::MilliCpu;
use crate::workload::{Demand, PodClass};

/// The fragmentation measure for nodes with GPUs of one kind.
#[derive(Clone, Debug, Default)]
pub struct Fragmentation {
    /// The distinct CPU requests, ascending.
    levels: Vec<MilliCpu>,
    /// One row for free CPU below the first level, and one from each level on.
    rows: Vec<Row>,
}

/// The weights of the classes that a node with this much free CPU can serve.
#[derive(Clone, Debug)]
struct Row {
    /// The weight of the classes of one GPU or of shares that fit, by the free percentage of the emptiest GPU.
    single: [f64; 101],
    /// The weight of the classes of several whole GPUs that fit, by the number of idle GPUs.
    several: [f64; GpuSet::CAPACITY + 1],
}

impl Fragmentation {
    /// Prepares the measure for classes with weights. Where the weights add up to less than 1, no
    /// node can serve the rest.
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

    /// Returns the expected unusable capacity of a node in GPUs; `left` yields the free percentage
    /// of each GPU.
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
        // Classes that do not fit can use nothing. Classes of whole GPUs cannot use parts. Classes
        // of a part cannot use a smaller part.
        let mut useless = f64::from(total) * (1.0 - single - several) + f64::from(parts) * several;
        for percent in left.filter(|percent| *percent < best) {
            useless += f64::from(percent) * (single - row.single[usize::from(percent)]);
        }
        useless / 100.0
    }
}

impl Row {
    fn add(&mut self, class: &PodClass, kind: &GpuKind, weight: f64) {
        // Whether enough GPUs have a share of several GPUs left is part of the weight of its class.
        if class.gpu_count() == 1 || matches!(class.demand, Demand::Share(_)) {
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
    use crate::request::{MemoryRequest, Share};
    use crate::units::{MiB, Percent};

    /// Computes the measure by its definition, class by class.
    fn by_definition(classes: &[(PodClass, f64)], cpu_left: MilliCpu, left: &[u8]) -> f64 {
        let mut sum = 0.0;
        for (class, weight) in classes {
            let needed = match class.demand {
                Demand::Share(share) => share.compute_percent.0,
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
            (1u32..100).prop_map(|compute_percent| Demand::Share(Share {
                count: 1,
                compute_percent: Percent(compute_percent),
                memory: MemoryRequest::Amount(MiB(0))
            })),
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
