//! The definitions of the generated workloads, by name.

use super::measures::Measure;
use super::shapes::{gibibytes, memory_share, share, uneven_share, whole, without_host};
use crate::cluster::pod::SimPod;

/// The definition of a generated workload.
#[derive(Clone, Debug)]
pub struct BenchWorkload {
    /// Name on the command line.
    pub name: String,
    /// Description in one line.
    pub about: String,
    /// The measure by which policies are ranked.
    pub headline: Headline,
    pub(super) nodes: NodeMix,
    pub(super) pattern: ArrivalPattern,
    /// Restarts of the scheduler at random moments.
    pub(super) restarts: usize,
    /// True if the pods of a phase are created together.
    pub(super) bursts: bool,
}

/// The measure by which policies are ranked on a workload.
#[derive(Clone, Copy, Debug)]
pub struct Headline {
    /// The value that counts.
    pub measure: Measure,
    /// The reason for this measure.
    pub reason: &'static str,
}

/// The kinds of nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NodeMix {
    /// All GPUs have 80 GiB.
    Alike,
    /// A quarter of the nodes each has GPUs of 16, 24, 40 and 80 GiB.
    Kinds,
}

/// When pods arrive and how long they run.
#[derive(Clone, Debug)]
pub(super) enum ArrivalPattern {
    /// Phases one after the other. Pods run forever; a pod that does not fit is rejected.
    Fill(Vec<Phase>),
    /// Streams at the same time. Pods end; a pod that does not fit waits.
    Churn { streams: Vec<Stream>, hours: u64, measured_from_hour: u64 },
}

/// Pods and how often each arrives, relative to the others.
pub(super) type Mix = Vec<(SimPod, u32)>;

/// A phase of arrivals without an end.
#[derive(Clone, Debug)]
pub(super) struct Phase {
    pub(super) mix: Mix,
    /// GPUs requested in this phase, as a part of all GPUs.
    pub(super) fill: f64,
}

/// Random arrivals of pods with random lifetimes.
#[derive(Clone, Debug)]
pub(super) struct Stream {
    pub(super) mix: Mix,
    /// GPUs that the pods would hold on average if none waited, as a part of all GPUs.
    pub(super) load: f64,
    pub(super) mean_lifetime_hours: f64,
    /// Hours of the day in which pods arrive, from the first to before the last.
    pub(super) hours_of_day: (u64, u64),
}

const OPENED: Headline = Headline {
    measure: Measure::Opened,
    reason: "every further GPU with a share is lost for whole-GPU pods",
};
const WHOLE_GRANTED: Headline =
    Headline { measure: Measure::WholeGranted, reason: "the whole-GPU pods need what the shares left idle" };
const EIGHT_FITS: Headline =
    Headline { measure: Measure::EightGpuFits, reason: "shares must not break up the idle nodes" };
const ALLOCATED: Headline =
    Headline { measure: Measure::Allocated, reason: "the pods request more than the cluster has" };
const GRANTED: Headline =
    Headline { measure: Measure::Granted, reason: "large shares fit only on GPUs with much memory" };
const EIGHT_FITS_OVER_TIME: Headline = Headline {
    measure: Measure::EightGpuFits,
    reason: "no large job waits, so the room for further ones counts",
};
const WAIT: Headline = Headline {
    measure: Measure::WaitMean,
    reason: "large jobs wait for idle nodes while shares come and go",
};

/// Part of the GPUs that shares request where the number of opened GPUs counts. Three quarters of
/// the GPUs stay idle in the best case, so that a policy can open too many.
const SHARES_FILL: f64 = 0.25;
/// Requests of a full cluster, as in the experiment on the openb trace.
const FULL: f64 = 1.3;

const ALIKE: [u32; 9] = [10, 20, 25, 30, 34, 40, 45, 50, 60];
const TWO: [(u32, u32); 3] = [(20, 50), (25, 60), (30, 70)];
const MEMORY: [u32; 3] = [20, 30, 45];
/// Sizes for variants of alike shares: two fill a GPU exactly, one does not.
const VARIANTS: [u32; 3] = [25, 30, 50];
const LOADS: [u32; 3] = [60, 80, 95];
/// Offered load from which large jobs wait.
const WAITING_LOAD: u32 = 90;

/// Restarts in one run.
const RESTARTS: usize = 4;

impl BenchWorkload {
    /// Returns all workloads.
    #[must_use]
    pub fn all() -> Vec<Self> {
        let mut all: Vec<Self> = ALIKE.into_iter().map(alike).collect();
        all.extend(TWO.into_iter().map(two));
        all.extend(TWO.into_iter().map(full));
        all.extend(MEMORY.into_iter().map(memory));
        all.extend(VARIANTS.into_iter().map(bare));
        all.push(mib_percent());
        all.extend([shares_then(1), shares_then(8), shares_then_whole(), quarters_then_8()]);
        all.push(whole_then_shares());
        all.push(mixed());
        all.extend(VARIANTS.into_iter().map(turnover));
        all.extend(LOADS.into_iter().map(churn));
        all.extend(LOADS.into_iter().map(churn_alike));
        all.push(day_night());
        all.extend([kinds_mixed(), kinds_small_first()]);
        let restarts =
            ["alike-25", "alike-30", "alike-50", "turnover-25", "quarters-then-8", "mixed", "churn-80"];
        let restarts = restarts.into_iter().chain(["churn-alike-80", "kinds-mixed"]);
        let bursts =
            ["alike-25", "alike-30", "alike-50", "two-25-60", "quarters-then-8", "mixed", "kinds-mixed"];
        let mut variants: Vec<Self> = restarts.filter_map(|name| find(&all, name).map(restarted)).collect();
        variants.extend(bursts.into_iter().filter_map(|name| find(&all, name).and_then(burst)));
        all.extend(variants);
        all
    }

    /// Returns the workload of a name. Sizes and loads in a name may be any percentage from 1 to 99.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        if let Some(rest) = name.strip_prefix("restart-") {
            return Self::named(rest).filter(|workload| workload.restarts == 0).map(restarted);
        }
        if let Some(rest) = name.strip_prefix("burst-") {
            return Self::named(rest).filter(|workload| workload.restarts == 0).and_then(burst);
        }
        let known = Self::all().into_iter().find(|workload| workload.name == name);
        known.or_else(|| {
            let (family, numbers) = name.split_at(name.find(|c: char| c.is_ascii_digit())?);
            let numbers: Vec<u32> =
                numbers.split('-').map(|text| text.parse().ok()).collect::<Option<_>>()?;
            if !numbers.iter().all(|number| (1..=99).contains(number)) {
                return None;
            }
            let workload = match (family, &numbers[..]) {
                ("alike-", [percent]) => alike(*percent),
                ("two-", [small, large]) => two((*small, *large)),
                ("full-", [small, large]) => full((*small, *large)),
                ("memory-", [percent]) => memory(*percent),
                ("bare-", [percent]) => bare(*percent),
                ("turnover-", [percent]) => turnover(*percent),
                ("churn-", [load]) => churn(*load),
                ("churn-alike-", [load]) => churn_alike(*load),
                _ => return None,
            };
            // Another spelling such as `alike-025` is no name.
            Some(workload).filter(|workload| workload.name == name)
        })
    }

    fn fill<const N: usize>(
        name: String,
        about: String,
        headline: Headline,
        phases: [(Mix, f64); N],
    ) -> Self {
        let phases = phases.into_iter().map(|(mix, fill)| Phase { mix, fill }).collect();
        Self {
            name,
            about,
            headline,
            nodes: NodeMix::Alike,
            pattern: ArrivalPattern::Fill(phases),
            restarts: 0,
            bursts: false,
        }
    }
}

fn alike(percent: u32) -> BenchWorkload {
    let about = format!("all pods request {percent} % of a GPU");
    BenchWorkload::fill(format!("alike-{percent}"), about, OPENED, [(vec![(share(percent), 1)], SHARES_FILL)])
}

fn two((small, large): (u32, u32)) -> BenchWorkload {
    let about = format!("as many pods request {small} % as {large} % of a GPU");
    let mix = vec![(share(small), 1), (share(large), 1)];
    BenchWorkload::fill(format!("two-{small}-{large}"), about, OPENED, [(mix, SHARES_FILL)])
}

fn full((small, large): (u32, u32)) -> BenchWorkload {
    let about = format!("as two-{small}-{large}, but the pods request 130 % of the cluster");
    let mix = vec![(share(small), 1), (share(large), 1)];
    BenchWorkload::fill(format!("full-{small}-{large}"), about, ALLOCATED, [(mix, FULL)])
}

fn memory(percent: u32) -> BenchWorkload {
    let about = format!("all pods request {percent} % of a GPU's memory and no compute");
    let mix = vec![(memory_share(percent), 1)];
    BenchWorkload::fill(format!("memory-{percent}"), about, OPENED, [(mix, SHARES_FILL)])
}

fn bare(percent: u32) -> BenchWorkload {
    let about = format!("all pods request {percent} % of a GPU and neither CPU nor main memory");
    let mix = vec![(without_host(share(percent)), 1)];
    BenchWorkload::fill(format!("bare-{percent}"), about, OPENED, [(mix, SHARES_FILL)])
}

fn mib_percent() -> BenchWorkload {
    let about = "half of the pods request 60 % compute and 10 % memory, the others the reverse";
    let mix = vec![(uneven_share(60, 10), 1), (uneven_share(10, 60), 1)];
    BenchWorkload::fill("mib-percent".to_owned(), about.to_owned(), OPENED, [(mix, SHARES_FILL)])
}

/// Returns shares of many sizes.
fn mixed_shares() -> Mix {
    [(10, 3), (20, 3), (25, 3), (30, 2), (40, 2), (50, 3), (60, 1), (75, 1)]
        .map(|(percent, weight)| (share(percent), weight))
        .to_vec()
}

fn shares_then(gpus: u8) -> BenchWorkload {
    let about = format!("shares of many sizes, then pods with {gpus} GPUs for all the rest");
    let phases = [(mixed_shares(), 0.4), (vec![(whole(gpus), 1)], 0.6)];
    BenchWorkload::fill(format!("shares-then-{gpus}"), about, WHOLE_GRANTED, phases)
}

fn shares_then_whole() -> BenchWorkload {
    let about = "shares of many sizes, then as many GPUs in pods with 1 as with 8 GPUs";
    let phases = [(mixed_shares(), 0.4), (vec![(whole(1), 8), (whole(8), 1)], 0.6)];
    BenchWorkload::fill("shares-then-whole".to_owned(), about.to_owned(), WHOLE_GRANTED, phases)
}

fn quarters_then_8() -> BenchWorkload {
    let about = "shares of 25 %, then pods with 8 GPUs for all the rest";
    let phases = [(vec![(share(25), 1)], 0.4), (vec![(whole(8), 1)], 0.6)];
    BenchWorkload::fill("quarters-then-8".to_owned(), about.to_owned(), WHOLE_GRANTED, phases)
}

fn whole_then_shares() -> BenchWorkload {
    let about = "pods with 1 and with 8 GPUs, then shares of many sizes";
    let phases = [(vec![(whole(1), 8), (whole(8), 1)], 0.4), (mixed_shares(), 0.2)];
    BenchWorkload::fill("whole-then-shares".to_owned(), about.to_owned(), EIGHT_FITS, phases)
}

/// Returns shares and whole GPUs: of the requested GPUs, about a third each are shares, sets of 1 to
/// 4 GPUs, and sets of 8.
fn mixed_sizes() -> Mix {
    let mut mix: Mix = mixed_shares().into_iter().map(|(pod, weight)| (pod, 4 * weight)).collect();
    mix.extend([(whole(1), 12), (whole(2), 4), (whole(4), 2), (whole(8), 3)]);
    mix
}

fn mixed() -> BenchWorkload {
    let about = "shares and sets of 1, 2, 4 and 8 GPUs request 130 % of the cluster";
    BenchWorkload::fill("mixed".to_owned(), about.to_owned(), ALLOCATED, [(mixed_sizes(), FULL)])
}

fn turnover(percent: u32) -> BenchWorkload {
    let stream = Stream {
        mix: vec![(share(percent), 1)],
        load: SHARES_FILL,
        mean_lifetime_hours: 8.0,
        hours_of_day: (0, 24),
    };
    let about = format!("shares of {percent} % come and go and hold a quarter of the cluster");
    churning(format!("turnover-{percent}"), about, OPENED, vec![stream])
}

/// Returns the headline measure for shares and large jobs at an offered load.
fn under_load(load_percent: u32) -> Headline {
    if load_percent < WAITING_LOAD { EIGHT_FITS_OVER_TIME } else { WAIT }
}

/// Returns shares for two fifths of the load, sets of 1 to 4 GPUs for a third, and sets of 8 for the
/// rest.
fn churn(load_percent: u32) -> BenchWorkload {
    let load = f64::from(load_percent) / 100.0;
    let stream = |mix: Mix, part: f64, mean_lifetime_hours: f64| Stream {
        mix,
        load: load * part,
        mean_lifetime_hours,
        hours_of_day: (0, 24),
    };
    let streams = vec![
        stream(mixed_shares(), 0.40, 8.0),
        stream(vec![(whole(1), 8), (whole(2), 3), (whole(4), 2)], 0.35, 6.0),
        stream(vec![(whole(8), 1)], 0.25, 6.0),
    ];
    let about = format!("shares and sets of 1 to 8 GPUs come and go at {load_percent} % offered load");
    churning(format!("churn-{load_percent}"), about, under_load(load_percent), streams)
}

fn churn_alike(load_percent: u32) -> BenchWorkload {
    let load = f64::from(load_percent) / 100.0;
    let stream = |pod: SimPod, mean_lifetime_hours: f64| Stream {
        mix: vec![(pod, 1)],
        load: load * 0.5,
        mean_lifetime_hours,
        hours_of_day: (0, 24),
    };
    let about = format!("shares of 25 % and sets of 8 GPUs come and go at {load_percent} % offered load");
    let streams = vec![stream(share(25), 8.0), stream(whole(8), 6.0)];
    churning(format!("churn-alike-{load_percent}"), about, under_load(load_percent), streams)
}

fn day_night() -> BenchWorkload {
    let streams = vec![
        Stream { mix: mixed_shares(), load: 0.5, mean_lifetime_hours: 4.0, hours_of_day: (8, 20) },
        Stream { mix: vec![(whole(8), 1)], load: 0.8, mean_lifetime_hours: 4.0, hours_of_day: (20, 32) },
    ];
    let about = "shares start by day, sets of 8 GPUs by night; all of them end";
    churning("day-night".to_owned(), about.to_owned(), WAIT, streams)
}

fn churning(name: String, about: String, headline: Headline, streams: Vec<Stream>) -> BenchWorkload {
    let pattern = ArrivalPattern::Churn { streams, hours: 6 * 24, measured_from_hour: 2 * 24 };
    BenchWorkload { name, about, headline, nodes: NodeMix::Alike, pattern, restarts: 0, bursts: false }
}

fn restarted(workload: BenchWorkload) -> BenchWorkload {
    let name = format!("restart-{}", workload.name);
    let about = format!("as {}; the scheduler restarts {RESTARTS} times at random moments", workload.name);
    BenchWorkload { name, about, restarts: RESTARTS, ..workload }
}

/// Returns the workload with all pods of a phase created together, if it has phases.
fn burst(workload: BenchWorkload) -> Option<BenchWorkload> {
    let name = format!("burst-{}", workload.name);
    let about =
        format!("as {}; the pods are created together, and the scheduler sees all first", workload.name);
    let has_phases = matches!(workload.pattern, ArrivalPattern::Fill(_)) && !workload.bursts;
    has_phases.then_some(BenchWorkload { name, about, bursts: true, ..workload })
}

fn find(workloads: &[BenchWorkload], name: &str) -> Option<BenchWorkload> {
    workloads.iter().find(|workload| workload.name == name).cloned()
}

fn kinds_mixed() -> BenchWorkload {
    let about = "shares of 4 to 60 GiB and single GPUs on GPUs of 16, 24, 40 and 80 GiB";
    let mut mix: Mix = [(4, 6), (8, 6), (12, 4), (20, 3), (30, 2), (60, 1)]
        .map(|(memory, weight)| (gibibytes(memory), weight))
        .to_vec();
    mix.push((whole(1), 4));
    let workload = BenchWorkload::fill("kinds-mixed".to_owned(), about.to_owned(), GRANTED, [(mix, 0.8)]);
    BenchWorkload { nodes: NodeMix::Kinds, ..workload }
}

fn kinds_small_first() -> BenchWorkload {
    let about = "shares of 4 to 12 GiB, then shares of 30 and 60 GiB, on GPUs of 16, 24, 40 and 80 GiB";
    let small = [(4, 1), (8, 1), (12, 1)].map(|(memory, weight)| (gibibytes(memory), weight)).to_vec();
    let large = vec![(gibibytes(30), 1), (gibibytes(60), 1)];
    let phases = [(small, 0.1), (large, 0.4)];
    let workload = BenchWorkload::fill("kinds-small-first".to_owned(), about.to_owned(), GRANTED, phases);
    BenchWorkload { nodes: NodeMix::Kinds, ..workload }
}
