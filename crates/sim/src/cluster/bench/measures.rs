//! The measures of a run.

/// A measure of a run. Counts are those at the end, or the means over time if pods end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Measure {
    /// The largest number of GPUs that held shares at the same time.
    OpenedPeak,
    /// GPUs that hold shares.
    Opened,
    /// Pods with one GPU that would still fit.
    OneGpuFits,
    /// Pods with eight GPUs that would still fit.
    EightGpuFits,
    /// GPUs that pods with whole GPUs hold.
    WholeGranted,
    /// Allocated GPUs in percent of all GPUs.
    Allocated,
    /// Granted part of all requests, in percent, each pod weighted by its size.
    Granted,
    /// Pods that do not run at the end, because they have found no room.
    NotPlaced,
    /// Mean waiting time of large jobs in minutes. Absent if no pod ends.
    WaitMean,
    /// 95th percentile of the waiting time of large jobs in minutes. Absent if no pod ends.
    WaitP95,
}

/// The values of one run, or the means of several.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Measures([Option<f64>; Measure::ALL.len()]);

impl Measure {
    /// All measures, in the order of the tables.
    pub const ALL: [Self; 10] = [
        Self::OpenedPeak,
        Self::Opened,
        Self::OneGpuFits,
        Self::EightGpuFits,
        Self::WholeGranted,
        Self::Allocated,
        Self::Granted,
        Self::NotPlaced,
        Self::WaitMean,
        Self::WaitP95,
    ];

    /// Returns the key in JSON.
    #[must_use]
    pub fn key(self) -> &'static str {
        match self {
            Self::OpenedPeak => "gpusOpenedPeak",
            Self::Opened => "gpusOpened",
            Self::OneGpuFits => "oneGpuPodsFit",
            Self::EightGpuFits => "eightGpuPodsFit",
            Self::WholeGranted => "wholeGpusGranted",
            Self::Allocated => "allocatedPercent",
            Self::Granted => "grantedPercent",
            Self::NotPlaced => "podsNotPlaced",
            Self::WaitMean => "largeWaitMeanMinutes",
            Self::WaitP95 => "largeWaitP95Minutes",
        }
    }

    /// Returns the description for people.
    #[must_use]
    pub fn title(self) -> &'static str {
        match self {
            Self::OpenedPeak => "most GPUs with shares on them at one time",
            Self::Opened => "GPUs with shares on them",
            Self::OneGpuFits => "1-GPU pods that still fit",
            Self::EightGpuFits => "8-GPU pods that still fit",
            Self::WholeGranted => "GPUs granted to whole-GPU pods",
            Self::Allocated => "GPUs allocated, %",
            Self::Granted => "requests granted, %",
            Self::NotPlaced => "pods that found no room",
            Self::WaitMean => "mean wait of large jobs, minutes",
            Self::WaitP95 => "95th percentile of the wait of large jobs, minutes",
        }
    }

    /// Returns whether a larger value is better.
    #[must_use]
    pub fn is_larger_better(self) -> bool {
        matches!(
            self,
            Self::OneGpuFits | Self::EightGpuFits | Self::WholeGranted | Self::Allocated | Self::Granted
        )
    }
}

impl Measures {
    /// Returns a value, or `None` if the workload has no such measure.
    #[must_use]
    pub fn get(&self, measure: Measure) -> Option<f64> {
        self.0[measure as usize]
    }

    pub(super) fn set(&mut self, measure: Measure, value: f64) {
        self.0[measure as usize] = Some(value);
    }

    /// Returns the mean of each measure over several runs of one workload.
    #[must_use]
    pub fn mean(runs: &[Self]) -> Self {
        let mut means = Self::default();
        for measure in Measure::ALL {
            let values: Vec<f64> = runs.iter().filter_map(|run| run.get(measure)).collect();
            if !values.is_empty() {
                means.set(measure, mean(&values));
            }
        }
        means
    }
}

/// Returns the mean, or 0 if there is no value.
pub(super) fn mean(values: &[f64]) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "a run has fewer than 2^52 pods")]
    let count = values.len().max(1) as f64;
    values.iter().sum::<f64>() / count
}
