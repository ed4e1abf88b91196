//! `what-if`: a hypothetical pod, built from a request on the command line.

use anyhow::{Result, bail, ensure};
use tessera_wire::foreign::dialect::{MemoryUnit, gpushare, vcuda, whole};
use tessera_wire::foreign::objects::{Amount, Amounts, Container, Metadata, Pod, PodSpec, Resources};

/// Resources that a container may request.
pub(crate) const RESOURCES: [&str; 7] = [
    gpushare::MEMORY,
    whole::GPUTOPOLOGY.resource,
    whole::NVIDIA.resource,
    vcuda::CORE,
    vcuda::MEMORY,
    "cpu",
    "memory",
];

/// Creates a pod with one container and these requests, such as `aliyun.com/gpu-mem=8` and `cpu=4`.
pub(crate) fn pod(namespace: &str, request: &[String]) -> Result<Pod> {
    let mut amounts = Amounts::new();
    for part in request.iter().filter(|part| !part.trim().is_empty()) {
        let Some((resource, amount)) = part.split_once(['=', ':']) else {
            bail!("{part:?} is not a request; write RESOURCE=AMOUNT, such as {}=8", gpushare::MEMORY);
        };
        let (resource, amount) = (resource.trim(), amount.trim());
        ensure!(
            RESOURCES.contains(&resource),
            "unknown resource {resource:?}; choose one of {}",
            RESOURCES.join(", ")
        );
        ensure!(
            amounts.insert(resource.to_owned(), Amount(amount.to_owned())).is_none(),
            "{resource} is given twice"
        );
    }
    let resources = Resources { limits: amounts.clone(), requests: amounts };
    // The container has no name, so that error messages do not start with one.
    let container = Container { resources, ..Container::default() };
    let metadata =
        Metadata { name: "what-if".to_owned(), namespace: namespace.to_owned(), ..Metadata::default() };
    let spec = PodSpec { containers: vec![container], ..PodSpec::default() };
    ensure!(spec.asks_for_gpus(), "requests no GPU; add one of {}", RESOURCES[..5].join(", "));
    for unit in [MemoryUnit::GiB, MemoryUnit::MiB] {
        spec.request(unit)?;
    }
    Ok(Pod { metadata, spec, ..Pod::default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_requests_and_explains_errors() {
        let typed =
            |parts: &[&str]| pod("team", &parts.iter().map(|part| (*part).to_owned()).collect::<Vec<_>>());
        let read = typed(&["tencent.com/vcuda-core=30", " tencent.com/vcuda-memory=16", "cpu=4"]).unwrap();
        assert_eq!(read.spec.containers[0].resources.limits["cpu"], Amount("4".into()));
        let error = |parts: &[&str]| typed(parts).unwrap_err().to_string();
        assert!(error(&["2"]).starts_with("\"2\" is not a request; write RESOURCE=AMOUNT"));
        assert!(error(&["gpu=2"]).starts_with("unknown resource \"gpu\"; choose one of aliyun.com/gpu-mem"));
        assert_eq!(error(&["cpu=1", "cpu=2"]), "cpu is given twice");
        assert!(error(&["cpu=1"]).starts_with("requests no GPU"));
        assert!(error(&["nvidia.com/gpu=half"]).starts_with("nvidia.com/gpu: half is not a number"));
        assert!(error(&["nvidia.com/gpu=1", "cpu=much"]).starts_with("cpu: `much` is not a quantity"));
    }
}
