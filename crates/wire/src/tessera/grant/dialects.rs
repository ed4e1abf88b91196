//! The grant annotations of each dialect, in the form that its own tools write and read.

use std::collections::BTreeMap;

use tessera_core::grant::{ContainerGrant, Hold};
use tessera_core::node::Node;
use tessera_core::request::{MemoryRequest, Request, Share};
use tessera_core::units::{GpuIndex, MiB, Percent};

use super::{Annotations, BadGrant};
use crate::foreign::dialect::{Dialect, MemoryUnit};
use crate::foreign::pod_spec::Claim;

/// gputopology: the GPU indexes of the whole pod, `0,1,2,3`.
const GROUP: &str = "ALIYUN_COM_GPU_GROUP";
const GROUP_ASSIGNED: &str = "ALIYUN_COM_GPU_ASSIGNED";
const GROUP_TIME: &str = "ALIYUN_COM_GPU_ASSUME_TIME";

/// gpushare: the index of the pod's GPU, the memory units of the GPU, and the units of the pod.
const MEMORY_INDEX: &str = "ALIYUN_COM_GPU_MEM_IDX";
const MEMORY_GPU: &str = "ALIYUN_COM_GPU_MEM_DEV";
const MEMORY_POD: &str = "ALIYUN_COM_GPU_MEM_POD";
const MEMORY_ASSIGNED: &str = "ALIYUN_COM_GPU_MEM_ASSIGNED";
const MEMORY_TIME: &str = "ALIYUN_COM_GPU_MEM_ASSUME_TIME";
/// gpushare's newer form: memory units by container position and GPU index, `{"0":{"3":4}}`.
const MEMORY_ALLOCATION: &str = "scheduler.framework.gpushare.allocation";

/// gpu-manager: the GPU indexes of the container whose position follows the prefix.
const CORE_INDEX: &str = "tencent.com/predicate-gpu-idx-";
const CORE_NODE: &str = "tencent.com/predicate-node";
const CORE_ASSIGNED: &str = "tencent.com/gpu-assigned";
const CORE_TIME: &str = "tencent.com/predicate-time";

pub(super) fn is_key(key: &str) -> bool {
    key == MEMORY_ALLOCATION
        || key == CORE_ASSIGNED
        || key.starts_with("ALIYUN_COM_GPU_")
        || key.starts_with("tencent.com/predicate-")
}

/// Returns whether a key marks pods that a scheduler placed. gputopology's and gpushare's plugins write it only
/// where their scheduler wrote it before, and their users tell the pods apart by it. gpu-manager writes its own
/// mark for every pod.
pub(super) fn is_scheduler_mark(key: &str) -> bool {
    key == GROUP_ASSIGNED || key == MEMORY_ASSIGNED
}

/// Adds the keys of every dialect that the pod uses.
pub(super) fn write(
    written: &mut Annotations,
    claims: &[Claim],
    grants: &[ContainerGrant],
    node: &Node,
    unit: MemoryUnit,
    now_nanos: u128,
) {
    let mut put = |key: &str, value: String| written.insert(key.to_owned(), value);
    let granted = |claim: &Claim| grants.iter().find(|grant| grant.container == claim.container);
    let indexes = |claim: &Claim| granted(claim).map(|grant| grant.gpus().to_string()).unwrap_or_default();
    let of =
        |dialect| claims.iter().filter(move |claim| claim.dialect == dialect && claim.position.is_some());
    for (key, value) in assigned_as(claims, "false") {
        put(&key, value);
    }
    if of(Dialect::Gputopology).next().is_some() {
        put(GROUP, of(Dialect::Gputopology).map(indexes).collect::<Vec<_>>().join(","));
        put(GROUP_TIME, now_nanos.to_string());
    }
    if let Some(first) = of(Dialect::Gpushare).next() {
        let gpu = granted(first).and_then(|grant| grant.gpus().lowest());
        let gpu_units = gpu.and_then(|gpu| node.gpu(gpu)).map_or(0, |gpu| gpu.memory.0 / unit.mib());
        put(MEMORY_INDEX, gpu.map_or_else(|| "-1".to_owned(), |gpu| gpu.to_string()));
        put(MEMORY_GPU, gpu_units.to_string());
        put(MEMORY_POD, of(Dialect::Gpushare).map(|claim| units(claim, unit)).sum::<u64>().to_string());
        put(MEMORY_TIME, now_nanos.to_string());
        let by_container: BTreeMap<String, BTreeMap<String, u64>> = of(Dialect::Gpushare)
            .filter_map(|claim| {
                let gpu = granted(claim)?.gpus().lowest()?;
                Some((claim.position?.to_string(), BTreeMap::from([(gpu.to_string(), units(claim, unit))])))
            })
            .collect();
        put(MEMORY_ALLOCATION, serde_json::to_string(&by_container).unwrap_or_default());
    }
    if of(Dialect::Vcuda).next().is_some() {
        put(CORE_NODE, node.name.to_string());
        put(CORE_TIME, now_nanos.to_string());
    }
    for claim in of(Dialect::Vcuda) {
        put(&format!("{CORE_INDEX}{}", claim.position.unwrap_or_default()), indexes(claim));
    }
}

/// Returns the keys that mark the GPUs as assigned.
pub(super) fn assigned(claims: &[Claim]) -> Annotations {
    assigned_as(claims, "true")
}

fn assigned_as(claims: &[Claim], value: &str) -> Annotations {
    let key = |claim: &Claim| match claim.dialect {
        Dialect::Nvidia | Dialect::Hami => None,
        Dialect::Gputopology => Some(GROUP_ASSIGNED),
        Dialect::Gpushare => Some(MEMORY_ASSIGNED),
        Dialect::Vcuda => Some(CORE_ASSIGNED),
    };
    claims.iter().filter_map(key).map(|key| (key.to_owned(), value.to_owned())).collect()
}

fn units(claim: &Claim, unit: MemoryUnit) -> u64 {
    match claim.request {
        Request::Share(Share { memory: MemoryRequest::Amount(memory), .. }) => memory.0 / unit.mib(),
        Request::Whole(_) | Request::Share(_) => 0,
    }
}

/// Parses the keys of every dialect that the pod uses. Returns `None` if there are none.
pub(super) fn read(
    annotations: &Annotations,
    claims: &[Claim],
    node: &Node,
    unit: MemoryUnit,
) -> Result<Option<Vec<ContainerGrant>>, BadGrant> {
    let mut grants = Vec::new();
    let mut group = indexes(annotations, GROUP)?.map(Vec::into_iter);
    let allocation = allocation(annotations)?;
    for claim in claims {
        if let (Dialect::Gpushare, Some(by_container), Some(position)) =
            (claim.dialect, &allocation, claim.position)
        {
            let Some(units) = by_container.get(&position).filter(|units| !units.is_empty()) else { continue };
            let share = |units: u64| Hold::Share {
                compute_percent: Percent::ZERO,
                memory: MiB(units.saturating_mul(unit.mib())),
            };
            let holds = units.iter().map(|(gpu, units)| (GpuIndex(*gpu), share(*units))).collect();
            grants.push(ContainerGrant { container: claim.container.clone(), role: claim.role, holds });
            continue;
        }
        let gpus = match (claim.dialect, claim.request) {
            // gputopology lists no GPUs of init containers.
            (Dialect::Gputopology, Request::Whole(count)) if claim.position.is_some() => {
                group.as_mut().map(|rest| rest.take(usize::from(count)).collect())
            }
            (Dialect::Gpushare, _) => indexes(annotations, MEMORY_INDEX)?,
            (Dialect::Vcuda, _) => match claim.position {
                Some(position) => indexes(annotations, &format!("{CORE_INDEX}{position}"))?,
                None => None,
            },
            _ => None,
        };
        let Some(gpus) = gpus.filter(|gpus: &Vec<GpuIndex>| !gpus.is_empty()) else { continue };
        let holds = node.holds(claim.request, gpus.into_iter().collect());
        grants.push(ContainerGrant { container: claim.container.clone(), role: claim.role, holds });
    }
    Ok((!grants.is_empty()).then_some(grants))
}

/// Parses a list such as `0,1,2,3`. gpushare writes `-1` for no GPU.
fn indexes(annotations: &Annotations, key: &str) -> Result<Option<Vec<GpuIndex>>, BadGrant> {
    let Some(text) = annotations.get(key).filter(|text| text.as_str() != "-1") else { return Ok(None) };
    let parts = text.split(',').filter(|part| !part.trim().is_empty());
    let parsed: Result<Vec<GpuIndex>, _> = parts.map(|part| part.trim().parse().map(GpuIndex)).collect();
    let bad = |_| BadGrant::Dialect {
        key: key.to_owned(),
        found: text.clone(),
        expected: "GPU indexes such as 0,1",
    };
    parsed.map(Some).map_err(bad)
}

/// Returns the error of each key whose value cannot be parsed, also of keys that only other tools read.
pub(super) fn errors(annotations: &Annotations) -> Vec<BadGrant> {
    annotations.iter().filter_map(|(key, value)| check(annotations, key, value).err()).collect()
}

fn check(annotations: &Annotations, key: &str, value: &str) -> Result<(), BadGrant> {
    let expect = |is_valid: bool, expected| match is_valid {
        true => Ok(()),
        false => Err(BadGrant::Dialect { key: key.to_owned(), found: value.to_owned(), expected }),
    };
    match key {
        GROUP | MEMORY_INDEX => indexes(annotations, key).map(drop),
        MEMORY_ALLOCATION => allocation(annotations).map(drop),
        MEMORY_GPU | MEMORY_POD => expect(value.parse::<u64>().is_ok(), "memory units such as 8"),
        GROUP_TIME | MEMORY_TIME | CORE_TIME => {
            expect(value.parse::<u128>().is_ok(), "nanoseconds since 1970")
        }
        GROUP_ASSIGNED | MEMORY_ASSIGNED | CORE_ASSIGNED => {
            expect(["true", "false"].contains(&value), "true or false")
        }
        _ => match key.strip_prefix(CORE_INDEX) {
            Some(position) if position.parse::<usize>().is_ok() => indexes(annotations, key).map(drop),
            Some(_) => expect(false, "a key that ends with the position of a container, such as 0"),
            None => Ok(()),
        },
    }
}

/// Memory units by container position and GPU index.
type Allocation = BTreeMap<usize, BTreeMap<u8, u64>>;

fn allocation(annotations: &Annotations) -> Result<Option<Allocation>, BadGrant> {
    let Some(text) = annotations.get(MEMORY_ALLOCATION) else { return Ok(None) };
    serde_json::from_str(text).map(Some).map_err(|_| BadGrant::Dialect {
        key: MEMORY_ALLOCATION.to_owned(),
        found: text.clone(),
        expected: "units by container position and GPU index, such as {\"0\":{\"3\":4}}",
    })
}
