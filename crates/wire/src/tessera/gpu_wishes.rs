//! Pod annotations that say which GPUs a pod wants: ours, and those of HAMi with the same meaning.

use std::collections::{BTreeMap, BTreeSet};

use tessera_core::placement::Policy;
use tessera_core::selection::{GpuSelection, NumaBinding, ScoringWeights};

/// An annotation that can be written in two ways: Tessera's key, then HAMi's.
type Keys = [&'static str; 2];

/// Parts of model names, separated by commas. GPUs of these models only.
const USE_MODELS: Keys = ["tessera.dev/use-gpu-models", "nvidia.com/use-gputype"];
/// Parts of model names, separated by commas. No GPU of these models.
const AVOID_MODELS: Keys = ["tessera.dev/avoid-gpu-models", "nvidia.com/nouse-gputype"];
/// UUIDs, separated by commas. These GPUs only.
const USE_UUIDS: Keys = ["tessera.dev/use-gpu-uuids", "nvidia.com/use-gpuuuid"];
/// UUIDs, separated by commas. None of these GPUs.
const AVOID_UUIDS: Keys = ["tessera.dev/avoid-gpu-uuids", "nvidia.com/nouse-gpuuuid"];
/// `true` if all GPUs of a container must belong to one NUMA node.
const NUMA: Keys = ["tessera.dev/numa-bind", "nvidia.com/numa-bind"];
/// Policy for the choice of a node.
const NODE_POLICY: Keys = ["tessera.dev/node-policy", "hami.io/node-scheduler-policy"];
/// Policies for the choice of GPUs, separated by commas.
const GPU_POLICY: Keys = ["tessera.dev/gpu-policy", "hami.io/gpu-scheduler-policy"];

/// HAMi's way of sharing a GPU, of which Tessera has one.
const MODE: &str = "nvidia.com/vgpu-mode";
const ONLY_MODE: &str = "hami-core";

/// Indexes of GPUs, and the key to use instead. They were proposed for HAMi, which does not read them. An index means
/// another GPU on every node.
const BY_INDEX: [(&str, &str); 2] =
    [("nvidia.com/use-gpuindexes", USE_UUIDS[0]), ("nvidia.com/nouse-gpuindexes", AVOID_UUIDS[0])];

/// Weights of the used parts of a GPU, by which `binpack` and `spread` compare GPUs for shares.
const WEIGHTS: Keys = ["tessera.dev/gpu-weights", "hami.io/device-scoring-weights"];

/// Largest number of models in one list. The scheduler compares each of them with the GPUs of every node, so a pod
/// must not make that expensive.
const MAX_MODELS: usize = 32;

/// All annotations that [`parse`] reads.
pub const KEYS: [&str; 19] = [
    USE_MODELS[0],
    USE_MODELS[1],
    AVOID_MODELS[0],
    AVOID_MODELS[1],
    USE_UUIDS[0],
    USE_UUIDS[1],
    AVOID_UUIDS[0],
    AVOID_UUIDS[1],
    NUMA[0],
    NUMA[1],
    NODE_POLICY[0],
    NODE_POLICY[1],
    GPU_POLICY[0],
    GPU_POLICY[1],
    MODE,
    BY_INDEX[0].0,
    BY_INDEX[1].0,
    WEIGHTS[0],
    WEIGHTS[1],
];

/// An annotation that cannot be followed. Each message says what to write instead.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadWish {
    /// A list is empty or has an empty entry.
    #[error("{key}: found {found:?}; write names separated by commas, or remove the annotation")]
    List {
        /// Key of the annotation.
        key: &'static str,
        /// Value of the annotation.
        found: String,
    },
    /// A list of models is longer than any cluster needs.
    #[error(
        "{key}: lists {count} models; write at most {MAX_MODELS}, such as the common part of their names"
    )]
    TooManyModels {
        /// Key of the annotation.
        key: &'static str,
        /// Number of entries.
        count: usize,
    },
    /// The value is none of those that the annotation may have.
    #[error("{key}: found {found:?}; write {expected}")]
    Value {
        /// Key of the annotation.
        key: &'static str,
        /// Value of the annotation.
        found: String,
        /// Valid values.
        expected: &'static str,
    },
    /// The annotation names GPUs by their indexes.
    #[error("{key}: GPUs cannot be chosen by index; write their UUIDs in {instead}")]
    Index {
        /// Key of the annotation.
        key: &'static str,
        /// Key to use in its place.
        instead: &'static str,
    },
    /// The weights are given for a policy that does not compare GPUs by their parts.
    #[error("{0} counts only with the policies binpack and spread; choose one of them with {gpu_policy}, or remove it", gpu_policy = GPU_POLICY[0])]
    WeightsWithoutPolicy(&'static str),
    /// Both keys of one annotation are given with different values.
    #[error("{0} and {1} contradict each other; keep one of them")]
    Contradiction(&'static str, &'static str),
}

/// The GPUs that a pod wants, and how to choose among them.
#[derive(Clone, Debug, Default)]
pub struct GpuWishes {
    /// The GPUs that the pod accepts.
    pub selection: GpuSelection,
    /// Policy for the choice of a node.
    pub node_policy: Option<Policy>,
    /// Policy for the choice of GPUs.
    pub gpu_policy: Option<Policy>,
}

/// Parses the annotations of a pod.
pub fn parse(annotations: &BTreeMap<String, String>) -> Result<GpuWishes, BadWish> {
    if let Some((key, instead)) = BY_INDEX.into_iter().find(|(key, _)| annotations.contains_key(*key)) {
        return Err(BadWish::Index { key, instead });
    }
    let mut wishes = GpuWishes {
        selection: GpuSelection {
            use_models: models(annotations, USE_MODELS)?,
            avoid_models: models(annotations, AVOID_MODELS)?,
            use_uuids: uuids(annotations, USE_UUIDS)?,
            avoid_uuids: uuids(annotations, AVOID_UUIDS)?,
            ..GpuSelection::default()
        },
        node_policy: match value(annotations, NODE_POLICY)? {
            None => None,
            Some((_, "binpack")) => Some(Policy::Binpack),
            Some((_, "spread")) => Some(Policy::Spread),
            Some((key, found)) => return Err(bad(key, found, "binpack or spread")),
        },
        gpu_policy: None,
    };
    for (key, name) in chain(annotations)? {
        let policy = match name {
            "binpack" => Policy::Binpack,
            "spread" => Policy::Spread,
            "topology-aware" => Policy::BestEffort,
            "mutex" => {
                wishes.selection.idle_only = true;
                continue;
            }
            "numa" => {
                wishes.selection.numa = NumaBinding::Preferred;
                continue;
            }
            found => {
                let expected =
                    "binpack, spread, topology-aware, mutex or numa, or several separated by commas";
                return Err(bad(key, found, expected));
            }
        };
        // As in HAMi, links count wherever the list names them. Otherwise the first policy decides, and a later one
        // would only order GPUs that the first one finds equal.
        match policy {
            Policy::BestEffort => wishes.gpu_policy = Some(policy),
            _ => drop(wishes.gpu_policy.get_or_insert(policy)),
        }
    }
    match value(annotations, NUMA)? {
        None | Some((_, "false")) => {}
        Some((_, "true")) => wishes.selection.numa = NumaBinding::Required,
        Some((key, found)) => return Err(bad(key, found, "true or false")),
    }
    match annotations.get(MODE).map(String::as_str) {
        None | Some(ONLY_MODE) => {}
        Some(found) => return Err(bad(MODE, found, ONLY_MODE)),
    }
    if let Some((key, found)) = value(annotations, WEIGHTS)? {
        wishes.selection.weights = Some(weights(found).ok_or_else(|| {
            bad(key, found, "slot=1,core=1,memory=3 with whole numbers that are not all 0")
        })?);
        // HAMi spreads over GPUs unless the pod says otherwise.
        match wishes.gpu_policy.get_or_insert(Policy::Spread) {
            Policy::Binpack | Policy::Spread => {}
            _ => return Err(BadWish::WeightsWithoutPolicy(key)),
        }
    }
    Ok(wishes)
}

/// Parses weights. Each part is named exactly once.
fn weights(text: &str) -> Option<ScoringWeights> {
    let mut parts = BTreeMap::new();
    for part in text.split(',') {
        let (name, weight) = part.split_once('=')?;
        if parts.insert(name.trim(), weight.trim().parse::<u32>().ok()?).is_some() {
            return None;
        }
    }
    let weights = ScoringWeights {
        slot: parts.remove("slot")?,
        core: parts.remove("core")?,
        memory: parts.remove("memory")?,
    };
    let is_zero = weights == ScoringWeights { slot: 0, core: 0, memory: 0 };
    (parts.is_empty() && !is_zero).then_some(weights)
}

fn bad(key: &'static str, found: &str, expected: &'static str) -> BadWish {
    BadWish::Value { key, found: found.to_owned(), expected }
}

/// Returns the value under either key, with the key that was used.
fn value(
    annotations: &BTreeMap<String, String>,
    [ours, theirs]: Keys,
) -> Result<Option<(&'static str, &str)>, BadWish> {
    let get = |key: &'static str| annotations.get(key).map(|value| (key, value.trim()));
    match (get(ours), get(theirs)) {
        (Some((_, first)), Some((_, second))) if first != second => Err(BadWish::Contradiction(ours, theirs)),
        (first, second) => Ok(first.or(second)),
    }
}

fn list(
    annotations: &BTreeMap<String, String>,
    keys: Keys,
) -> Result<Option<(&'static str, Vec<&str>)>, BadWish> {
    let Some((key, found)) = value(annotations, keys)? else { return Ok(None) };
    let names: Vec<&str> = found.split(',').map(str::trim).collect();
    if names.iter().any(|name| name.is_empty()) {
        return Err(BadWish::List { key, found: found.to_owned() });
    }
    Ok(Some((key, names)))
}

fn models(annotations: &BTreeMap<String, String>, keys: Keys) -> Result<Vec<String>, BadWish> {
    let Some((key, names)) = list(annotations, keys)? else { return Ok(Vec::new()) };
    if names.len() > MAX_MODELS {
        return Err(BadWish::TooManyModels { key, count: names.len() });
    }
    Ok(names.into_iter().map(str::to_lowercase).collect())
}

fn uuids(annotations: &BTreeMap<String, String>, keys: Keys) -> Result<BTreeSet<String>, BadWish> {
    let listed = list(annotations, keys)?.map(|(_, names)| names).unwrap_or_default();
    Ok(listed.into_iter().map(str::to_owned).collect())
}

fn chain(annotations: &BTreeMap<String, String>) -> Result<Vec<(&'static str, &str)>, BadWish> {
    let Some((key, found)) = value(annotations, GPU_POLICY)? else { return Ok(Vec::new()) };
    Ok(found.split(',').map(|name| (key, name.trim())).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pairs: &[(&str, &str)]) -> Result<GpuWishes, BadWish> {
        parse(&pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect())
    }

    #[test]
    fn reads_both_keys() {
        for [use_models, numa, policy] in [
            ["tessera.dev/use-gpu-models", "tessera.dev/numa-bind", "tessera.dev/gpu-policy"],
            ["nvidia.com/use-gputype", "nvidia.com/numa-bind", "hami.io/gpu-scheduler-policy"],
        ] {
            let wishes =
                read(&[(use_models, "A100, h200"), (numa, "true"), (policy, "numa,spread")]).unwrap();
            assert_eq!(wishes.selection.use_models, ["a100", "h200"]);
            assert_eq!(wishes.selection.numa, NumaBinding::Required);
            assert_eq!(wishes.gpu_policy.unwrap().name(), "spread");
            assert!(wishes.node_policy.is_none());
        }
        let wishes = read(&[
            ("nvidia.com/nouse-gpuuuid", "GPU-1"),
            ("hami.io/node-scheduler-policy", "binpack"),
            ("hami.io/gpu-scheduler-policy", "mutex"),
            ("nvidia.com/vgpu-mode", "hami-core"),
        ])
        .unwrap();
        assert_eq!(wishes.selection.avoid_uuids, ["GPU-1".to_owned()].into());
        assert!(wishes.selection.idle_only && wishes.gpu_policy.is_none());
        assert_eq!(wishes.node_policy.unwrap().name(), "binpack");
        assert!(read(&[]).unwrap().selection.accepts_all());
    }

    #[test]
    fn a_list_of_policies_counts_as_in_hami() {
        let check = |list: &str, policy: Option<&str>, numa: NumaBinding, idle_only: bool| {
            let wishes = read(&[("hami.io/gpu-scheduler-policy", list)]).unwrap();
            assert_eq!(wishes.gpu_policy.map(|policy| policy.name()), policy, "{list}");
            assert_eq!((wishes.selection.numa, wishes.selection.idle_only), (numa, idle_only), "{list}");
        };
        check("numa,spread", Some("spread"), NumaBinding::Preferred, false);
        check(" binpack , numa,mutex", Some("binpack"), NumaBinding::Preferred, true);
        check("mutex,binpack", Some("binpack"), NumaBinding::Any, true);
        check("numa", None, NumaBinding::Preferred, false);
        check("topology-aware,spread", Some("best-effort"), NumaBinding::Any, false);
        check("spread,topology-aware", Some("best-effort"), NumaBinding::Any, false);
    }

    /// An annotation may have 256 KiB, and the models are compared with those of every node.
    #[test]
    fn a_list_of_models_is_short_and_a_list_of_uuids_may_be_long() {
        let many = |count: usize| vec!["a"; count].join(",");
        assert_eq!(
            read(&[("nvidia.com/use-gputype", &many(100_000))]).unwrap_err().to_string(),
            "nvidia.com/use-gputype: lists 100000 models; write at most 32, such as the common part of their names"
        );
        assert!(read(&[("nvidia.com/nouse-gputype", &many(MAX_MODELS))]).is_ok());
        let uuids: Vec<String> = (0..5000).map(|number| format!("GPU-{number}")).collect();
        let wishes = read(&[("nvidia.com/nouse-gpuuuid", &uuids.join(","))]).unwrap();
        assert_eq!(wishes.selection.avoid_uuids.len(), 5000);
    }

    #[test]
    fn reads_weights() {
        let wishes = read(&[
            ("hami.io/device-scoring-weights", "memory=3, slot=1,core=0"),
            ("hami.io/gpu-scheduler-policy", "numa,binpack"),
        ])
        .unwrap();
        assert_eq!(wishes.selection.weights, Some(ScoringWeights { slot: 1, core: 0, memory: 3 }));
        assert_eq!(wishes.gpu_policy.unwrap().name(), "binpack");
        let alone = read(&[("tessera.dev/gpu-weights", "slot=1,core=1,memory=1")]).unwrap();
        assert_eq!(alone.gpu_policy.unwrap().name(), "spread");
    }

    #[test]
    fn every_error_says_what_to_write_instead() {
        let check = |key: &str, value: &str, expected: &str| {
            assert_eq!(read(&[(key, value)]).unwrap_err().to_string(), expected);
        };
        check(
            "nvidia.com/use-gputype",
            "A100,,T4",
            "nvidia.com/use-gputype: found \"A100,,T4\"; write names separated by commas, or remove the annotation",
        );
        check(
            "hami.io/gpu-scheduler-policy",
            "numa,fast",
            "hami.io/gpu-scheduler-policy: found \"fast\"; write binpack, spread, topology-aware, mutex or numa, or \
             several separated by commas",
        );
        check("nvidia.com/numa-bind", "yes", "nvidia.com/numa-bind: found \"yes\"; write true or false");
        check(
            "nvidia.com/nouse-gpuindexes",
            "0,1",
            "nvidia.com/nouse-gpuindexes: GPUs cannot be chosen by index; write their UUIDs in tessera.dev/avoid-gpu-uuids",
        );
        check("nvidia.com/vgpu-mode", "mig", "nvidia.com/vgpu-mode: found \"mig\"; write hami-core");
        for bad in
            ["", "slot=1,core=1", "slot=0,core=0,memory=0", "slot=1,core=1,memory=-1", "slot=1,slot=1,core=1"]
        {
            check(
                "hami.io/device-scoring-weights",
                bad,
                &format!(
                    "hami.io/device-scoring-weights: found {bad:?}; write slot=1,core=1,memory=3 with whole numbers \
                     that are not all 0"
                ),
            );
        }
        let both = [
            ("hami.io/device-scoring-weights", "slot=1,core=1,memory=3"),
            ("tessera.dev/gpu-policy", "topology-aware"),
        ];
        assert_eq!(
            read(&both).unwrap_err().to_string(),
            "hami.io/device-scoring-weights counts only with the policies binpack and spread; choose one of them with \
             tessera.dev/gpu-policy, or remove it"
        );
        let both = [("tessera.dev/numa-bind", "true"), ("nvidia.com/numa-bind", "false")];
        let error = read(&both).unwrap_err().to_string();
        assert_eq!(
            error,
            "tessera.dev/numa-bind and nvidia.com/numa-bind contradict each other; keep one of them"
        );
    }
}
