//! `what-if`: a hypothetical pod, built from a request on the command line.

use std::collections::BTreeMap;

use anyhow::{Result, bail, ensure};
use tessera_wire::foreign::dialect::{MemoryUnit, gpushare, hami, vcuda, whole};
use tessera_wire::foreign::objects::{Amount, Amounts, Container, Metadata, Pod, PodSpec, Resources};
use tessera_wire::tessera::preferences;

/// Resources that a container may request.
pub(crate) const RESOURCES: [&str; 10] = [
    gpushare::MEMORY,
    whole::GPUTOPOLOGY.resource,
    whole::NVIDIA.resource,
    vcuda::CORE,
    vcuda::MEMORY,
    hami::MEMORY,
    hami::MEMORY_PERCENT,
    hami::CORES,
    "cpu",
    "memory",
];

/// Creates a pod with one container and these requests, such as `aliyun.com/gpu-mem=8` and `cpu=4`, and with
/// annotations such as `tessera.dev/numa-bind=true`.
pub(crate) fn pod(namespace: &str, request: &[String], annotations: &[String]) -> Result<Pod> {
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
    let resources = Resources { limits: amounts.clone(), requests: amounts, ..Resources::default() };
    // The container has no name, so that error messages do not start with one.
    let container = Container { resources, ..Container::default() };
    let metadata = Metadata {
        name: "what-if".to_owned(),
        namespace: namespace.to_owned(),
        annotations: parse_annotations(annotations)?,
        ..Metadata::default()
    };
    let spec = PodSpec { containers: vec![container], ..PodSpec::default() };
    ensure!(spec.asks_for_gpus(), "requests no GPU; add one of {}", RESOURCES[..8].join(", "));
    for unit in [MemoryUnit::GiB, MemoryUnit::MiB] {
        spec.request(unit)?;
    }
    Ok(Pod { metadata, spec, ..Pod::default() })
}

/// Parses annotations. Only those that say which GPUs a pod wants have an effect, so others are errors.
fn parse_annotations(typed: &[String]) -> Result<BTreeMap<String, String>> {
    let mut annotations = BTreeMap::new();
    for part in typed {
        let Some((key, value)) = part.split_once('=') else {
            bail!("{part:?} is not an annotation; write KEY=VALUE, such as tessera.dev/numa-bind=true");
        };
        ensure!(preferences::is_key(key), "annotation {key:?} does not change where a pod fits");
        ensure!(annotations.insert(key.to_owned(), value.to_owned()).is_none(), "{key} is given twice");
    }
    preferences::parse(&annotations)?;
    Ok(annotations)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_requests_and_explains_errors() {
        let typed = |parts: &[&str]| {
            pod("team", &parts.iter().map(|part| (*part).to_owned()).collect::<Vec<_>>(), &[])
        };
        let read = typed(&["tencent.com/vcuda-core=30", " tencent.com/vcuda-memory=16", "cpu=4"]).unwrap();
        assert_eq!(read.spec.containers[0].resources.limits["cpu"], Amount("4".into()));
        let error = |parts: &[&str]| typed(parts).unwrap_err().to_string();
        assert!(error(&["2"]).starts_with("\"2\" is not a request; write RESOURCE=AMOUNT"));
        assert!(error(&["gpu=2"]).starts_with("unknown resource \"gpu\"; choose one of aliyun.com/gpu-mem"));
        assert_eq!(error(&["cpu=1", "cpu=2"]), "cpu is given twice");
        assert!(error(&["cpu=1"]).starts_with("requests no GPU"));
        assert!(error(&["nvidia.com/gpu=half"]).starts_with("nvidia.com/gpu: half is not a number"));
        assert!(
            typed(&["nvidia.com/gpu=2", "nvidia.com/gpumem-percentage=50", "nvidia.com/gpucores=30"]).is_ok()
        );
        let annotated =
            |annotation: &str| pod("team", &["nvidia.com/gpu=1".to_owned()], &[annotation.to_owned()]);
        let pod = annotated("tessera.dev/numa-bind=true").unwrap();
        assert_eq!(pod.metadata.annotations["tessera.dev/numa-bind"], "true");
        let error_of = |annotation: &str| annotated(annotation).unwrap_err().to_string();
        assert!(error_of("tessera.dev/numa-bind").ends_with("such as tessera.dev/numa-bind=true"));
        assert_eq!(error_of("team=x"), "annotation \"team\" does not change where a pod fits");
        assert_eq!(
            error_of("tessera.dev/numa-bind=maybe"),
            "tessera.dev/numa-bind: found \"maybe\"; write true or false"
        );
        assert!(error(&["nvidia.com/gpu=1", "cpu=much"]).starts_with("cpu: `much` is not a quantity"));
    }
}
