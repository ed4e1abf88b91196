//! Gangs: pods that need all their GPUs at the same time, by the labels and annotations of each pod.
//!
//! Tessera's annotation `tessera.dev/gang` names a gang and its size. Pods of other projects state
//! both in keys of their own, or name a PodGroup object that has the size.

use std::collections::BTreeMap;
use std::fmt;

use tessera_core::gang::TopologyWish;
use tessera_core::units::NodeName;

use crate::foreign::objects::Pod;

/// Annotation with the gang of a pod: `NAME/SIZE`, or `SIZE` for the pods of one job, or [`ALL`].
pub const KEY: &str = "tessera.dev/gang";

/// Value of [`KEY`] for all pods of a job whose object states their number.
pub const ALL: &str = "all";

/// Annotation with the topology level that a gang wants: `required=KEY` or `preferred=KEY`.
pub const TOPOLOGY_KEY: &str = "tessera.dev/gang-topology";

/// Label of the coscheduling plugin with the name of a PodGroup.
const COSCHEDULING_LABEL: &str = "scheduling.x-k8s.io/pod-group";

/// Labels of the coscheduling plugin without PodGroup objects: the name and the size.
const LIGHT_NAME_LABEL: &str = "pod-group.scheduling.sigs.k8s.io/name";
const LIGHT_SIZE_LABEL: &str = "pod-group.scheduling.sigs.k8s.io/min-available";

/// Kueue's label and annotation of a group of plain pods: the name and the number of pods.
const KUEUE_NAME_LABEL: &str = "kueue.x-k8s.io/pod-group-name";
const KUEUE_SIZE_ANNOTATION: &str = "kueue.x-k8s.io/pod-group-total-count";

/// Annotations of Volcano with the name of a PodGroup: the one that its controllers write, and the one of its API group.
const VOLCANO_ANNOTATION: &str = "scheduling.k8s.io/group-name";
const VOLCANO_OWN_ANNOTATION: &str = "scheduling.volcano.sh/group-name";

/// Annotation of KAI with the name of a PodGroup.
const KAI_ANNOTATION: &str = "pod-group-name";

/// Label of JobSet with the name of the JobSet.
const JOBSET_LABEL: &str = "jobset.sigs.k8s.io/jobset-name";

/// Labels of Kubeflow's training operator: the name of the job, and the controller of its kind.
const KUBEFLOW_NAME_LABEL: &str = "training.kubeflow.org/job-name";
const KUBEFLOW_CONTROLLER_LABEL: &str = "training.kubeflow.org/operator-name";

/// Labels with the name of the job that a pod belongs to, the outermost job first.
const JOB_LABELS: [&str; 4] = [JOBSET_LABEL, KUBEFLOW_NAME_LABEL, "batch.kubernetes.io/job-name", "job-name"];

/// Annotations that [`membership`] reads.
const ANNOTATIONS: [&str; 6] =
    [KEY, TOPOLOGY_KEY, KUEUE_SIZE_ANNOTATION, VOLCANO_ANNOTATION, VOLCANO_OWN_ANNOTATION, KAI_ANNOTATION];

/// Largest gang. No cluster has more nodes, and larger numbers are mistakes.
pub(crate) const MAX_SIZE: u32 = 10_000;

/// Longest name of a gang, which is that of an object of Kubernetes.
const MAX_NAME_LENGTH: usize = 253;

/// The project whose keys make pods a gang. Gangs of the same name and different projects differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum GangOrigin {
    /// Tessera's annotation.
    Tessera,
    /// The coscheduling plugin.
    Coscheduling,
    /// Kueue's groups of plain pods.
    Kueue,
    /// The PodGroups of Volcano.
    Volcano,
    /// The PodGroups of KAI.
    Kai,
    /// The PodGroups of Kubernetes itself.
    Kubernetes,
    /// A JobSet, with Tessera's annotation [`ALL`].
    JobSet,
    /// A job of Kubeflow's training operator for PyTorch, with Tessera's annotation [`ALL`], as the ones below.
    PyTorchJob,
    /// A job for TensorFlow.
    TensorFlowJob,
    /// A job for XGBoost.
    XgBoostJob,
    /// A job for PaddlePaddle.
    PaddleJob,
    /// A job for JAX.
    JaxJob,
}

/// The identity of a gang.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GangKey {
    /// Namespace of the pods.
    pub namespace: String,
    /// Name of the gang.
    pub name: String,
    /// The project whose keys name the gang.
    pub origin: GangOrigin,
}

/// The part of a pod in a gang.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Membership {
    /// The gang of the pod.
    pub gang: GangKey,
    /// Number of pods in the gang, or `None` if only an object such as its PodGroup states it.
    pub size: Option<u32>,
    /// The topology level that the pod states for its gang.
    pub topology: TopologyWish,
}

/// A gang annotation that cannot be followed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadGang {
    /// The value of Tessera's annotation is malformed.
    #[error("{KEY}: found {0:?}; write NAME/SIZE, such as train/4, or only SIZE for the pods of one job")]
    Value(String),
    /// The value is [`ALL`], and no object that Tessera reads states the number of pods.
    #[error(
        "{KEY}: found \"all\" on a pod that belongs to no JobSet and no job of Kubeflow's training operator; write \
         NAME/SIZE, such as train/4"
    )]
    NoJobObject,
    /// The size is out of range.
    #[error("{KEY}: found size {0}; write the number of pods in the gang, from 1 to {MAX_SIZE}")]
    Size(u32),
    /// The value states no name, and the pod belongs to no job that has one.
    #[error(
        "{KEY}: found {0:?} on a pod that belongs to no job, so the gang has no name; write NAME/SIZE, such as train/4"
    )]
    NoJob(String),
    /// The topology level is malformed.
    #[error(
        "{TOPOLOGY_KEY}: found {0:?}; write required=KEY or preferred=KEY, where KEY is a label of nodes such as \
         topology.kubernetes.io/zone"
    )]
    Topology(String),
}

impl fmt::Display for GangKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

impl GangOrigin {
    /// Returns how users know the project and its groups.
    #[must_use]
    pub const fn describe(self) -> &'static str {
        match self {
            Self::Tessera => "the annotation tessera.dev/gang",
            Self::JobSet => "the JobSet",
            Self::PyTorchJob => "the PyTorchJob",
            Self::TensorFlowJob => "the TFJob",
            Self::XgBoostJob => "the XGBoostJob",
            Self::PaddleJob => "the PaddleJob",
            Self::JaxJob => "the JAXJob",
            Self::Coscheduling => "the label scheduling.x-k8s.io/pod-group",
            Self::Kueue => "the label kueue.x-k8s.io/pod-group-name",
            Self::Volcano => "the annotation scheduling.k8s.io/group-name",
            Self::Kai => "the annotation pod-group-name",
            Self::Kubernetes => "the field spec.schedulingGroup",
        }
    }
}

/// How far the pods of a gang are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GangProgress {
    /// Number of pods in the gang.
    pub size: usize,
    /// Number of pods that exist.
    pub present: usize,
    /// Number of pods that have a node or need none.
    pub settled: usize,
}

impl GangProgress {
    /// Returns the line of an explanation about a pod of a gang. `reserved_on` is the node where the scheduler keeps a
    /// place for the pod; `unplaced` says why pods wait although all of them exist.
    #[must_use]
    pub fn describe(self, gang: &GangKey, reserved_on: Option<&NodeName>, unplaced: &str) -> String {
        let Self { size, present, settled } = self;
        let state = match reserved_on {
            Some(node) => format!("its place is reserved on node {node}"),
            None if settled >= size => "all of them have nodes".to_owned(),
            None if present < size => "it waits until all of them exist".to_owned(),
            None => unplaced.to_owned(),
        };
        format!("gang {gang}: {present} of {size} pods exist, {settled} have nodes; {state}")
    }
}

/// Returns whether [`membership`] reads the annotation with this key.
#[must_use]
pub fn is_key(key: &str) -> bool {
    ANNOTATIONS.contains(&key)
}

/// Checks Tessera's annotations without regard to the pod's labels.
pub fn check(annotations: &BTreeMap<String, String>) -> Result<(), BadGang> {
    topology(annotations)?;
    match annotations.get(KEY) {
        Some(value) if value != ALL => parse(value).map(|_| ()),
        _ => Ok(()),
    }
}

/// Returns the gang of a pod, or `None` if the pod is placed alone. The pod of a gang of one is placed alone.
pub fn membership(pod: &Pod) -> Result<Option<Membership>, BadGang> {
    let meta = &pod.metadata;
    let own = || pod.spec.scheduling_group.as_ref().map(|group| &group.pod_group_name);
    let Some((origin, name, size)) = group(&meta.labels, &meta.annotations, own)? else { return Ok(None) };
    let gang = GangKey { namespace: meta.namespace.clone(), name, origin };
    let member = Membership { gang, size, topology: topology(&meta.annotations)? };
    Ok(Some(member).filter(|member| member.size != Some(1)))
}

type Group = (GangOrigin, String, Option<u32>);

fn group<'p>(
    labels: &'p BTreeMap<String, String>,
    annotations: &'p BTreeMap<String, String>,
    scheduling_group: impl FnOnce() -> Option<&'p String>,
) -> Result<Option<Group>, BadGang> {
    if let Some(value) = annotations.get(KEY) {
        if value == ALL {
            let (origin, name) = job_object(labels).ok_or(BadGang::NoJobObject)?;
            return Ok(Some((origin, name.clone(), None)));
        }
        let (name, size) = parse(value)?;
        let job = || JOB_LABELS.iter().find_map(|key| labels.get(*key));
        let name = name.or_else(|| job().map(String::as_str)).ok_or_else(|| BadGang::NoJob(value.clone()))?;
        return Ok(Some((GangOrigin::Tessera, name.to_owned(), Some(size))));
    }
    // Other projects check their own keys, so a malformed size is an unknown one.
    let number = |text: Option<&String>| {
        text.and_then(|text| text.parse::<u32>().ok()).filter(|size| (1..=MAX_SIZE).contains(size))
    };
    let sized = [
        (GangOrigin::Coscheduling, labels.get(LIGHT_NAME_LABEL), number(labels.get(LIGHT_SIZE_LABEL))),
        (GangOrigin::Kueue, labels.get(KUEUE_NAME_LABEL), number(annotations.get(KUEUE_SIZE_ANNOTATION))),
        (GangOrigin::Coscheduling, labels.get(COSCHEDULING_LABEL), None),
        (GangOrigin::Volcano, annotations.get(VOLCANO_ANNOTATION), None),
        (GangOrigin::Volcano, annotations.get(VOLCANO_OWN_ANNOTATION), None),
        (GangOrigin::Kai, annotations.get(KAI_ANNOTATION), None),
        (GangOrigin::Kubernetes, scheduling_group(), None),
    ];
    let named = |(origin, name, size): (GangOrigin, Option<&String>, Option<u32>)| {
        name.filter(|name| is_name(name)).map(|name| (origin, name.clone(), size))
    };
    Ok(sized.into_iter().find_map(named))
}

/// Returns the job with an object that states the number of its pods, by the labels that its controller writes.
fn job_object(labels: &BTreeMap<String, String>) -> Option<(GangOrigin, &String)> {
    if let Some(name) = labels.get(JOBSET_LABEL) {
        return Some((GangOrigin::JobSet, name));
    }
    let origin = match labels.get(KUBEFLOW_CONTROLLER_LABEL)?.as_str() {
        "pytorchjob-controller" => GangOrigin::PyTorchJob,
        "tfjob-controller" => GangOrigin::TensorFlowJob,
        "xgboostjob-controller" => GangOrigin::XgBoostJob,
        "paddlejob-controller" => GangOrigin::PaddleJob,
        "jaxjob-controller" => GangOrigin::JaxJob,
        // The launcher of an MPIJob waits until its workers run, so they do not start at the same time.
        _ => return None,
    };
    Some((origin, labels.get(KUBEFLOW_NAME_LABEL)?))
}

/// Parses `NAME/SIZE` or `SIZE`.
fn parse(value: &str) -> Result<(Option<&str>, u32), BadGang> {
    let bad = || BadGang::Value(value.to_owned());
    let (name, size) = match value.rsplit_once('/') {
        Some((name, size)) => (Some(name), size),
        None => (None, value),
    };
    let is_number = !size.is_empty() && size.bytes().all(|byte| byte.is_ascii_digit());
    if !is_number || name.is_some_and(|name| !is_name(name)) {
        return Err(bad());
    }
    let size: u32 = size.parse().map_err(|_| bad())?;
    if (1..=MAX_SIZE).contains(&size) { Ok((name, size)) } else { Err(BadGang::Size(size)) }
}

fn is_name(name: &str) -> bool {
    let is_part = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    !name.is_empty() && name.len() <= MAX_NAME_LENGTH && name.bytes().all(is_part)
}

/// Returns whether a text can be the key of a label.
pub(crate) fn is_label(key: &str) -> bool {
    match key.split_once('/') {
        Some((prefix, name)) => is_name(prefix) && is_name(name),
        None => is_name(key),
    }
}

fn topology(annotations: &BTreeMap<String, String>) -> Result<TopologyWish, BadGang> {
    let Some(value) = annotations.get(TOPOLOGY_KEY) else { return Ok(TopologyWish::Any) };
    let bad = || BadGang::Topology(value.clone());
    let (level, key) = value.split_once('=').ok_or_else(bad)?;
    match level {
        _ if !is_label(key) => Err(bad()),
        "required" => Ok(TopologyWish::Required(key.to_owned())),
        "preferred" => Ok(TopologyWish::Preferred(key.to_owned())),
        _ => Err(bad()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    fn read(labels: &[(&str, &str)], annotations: &[(&str, &str)]) -> Result<Option<Membership>, BadGang> {
        let mut pod = Pod::default();
        pod.metadata.namespace = "team".to_owned();
        (pod.metadata.labels, pod.metadata.annotations) = (map(labels), map(annotations));
        membership(&pod)
    }

    fn check_group(labels: &[(&str, &str)], annotations: &[(&str, &str)], expected: Option<Group>) {
        let found = read(labels, annotations).unwrap();
        assert_eq!(found.map(|member| (member.gang.origin, member.gang.name, member.size)), expected);
    }

    #[test]
    fn reads_the_gang_of_each_project() {
        let group = |origin, size| Some((origin, "train".to_owned(), size));
        check_group(&[], &[(KEY, "train/4")], group(GangOrigin::Tessera, Some(4)));
        check_group(&[("job-name", "train")], &[(KEY, "4")], group(GangOrigin::Tessera, Some(4)));
        let in_jobset = [("jobset.sigs.k8s.io/jobset-name", "train"), ("job-name", "train-workers-0")];
        check_group(&in_jobset, &[(KEY, "4")], group(GangOrigin::Tessera, Some(4)));
        check_group(&[(COSCHEDULING_LABEL, "train")], &[], group(GangOrigin::Coscheduling, None));
        let light = [(LIGHT_NAME_LABEL, "train"), (LIGHT_SIZE_LABEL, "3")];
        check_group(&light, &[], group(GangOrigin::Coscheduling, Some(3)));
        let count = [(KUEUE_SIZE_ANNOTATION, "2")];
        check_group(&[(KUEUE_NAME_LABEL, "train")], &count, group(GangOrigin::Kueue, Some(2)));
        check_group(&[], &[(VOLCANO_ANNOTATION, "train")], group(GangOrigin::Volcano, None));
        check_group(&[], &[(VOLCANO_OWN_ANNOTATION, "train")], group(GangOrigin::Volcano, None));
        check_group(&[], &[(KAI_ANNOTATION, "train")], group(GangOrigin::Kai, None));
        let both = [(VOLCANO_ANNOTATION, "other"), (KEY, "train/4")];
        check_group(&[], &both, group(GangOrigin::Tessera, Some(4)));
        check_group(&[("app", "train")], &[], None);
        check_group(&[], &[(KEY, "train/1")], None);
    }

    #[test]
    fn all_pods_of_a_job_are_a_gang_of_the_size_that_its_object_states() {
        let all = [(KEY, "all")];
        let in_jobset = [(JOBSET_LABEL, "train"), ("job-name", "train-workers-0")];
        check_group(&in_jobset, &all, Some((GangOrigin::JobSet, "train".to_owned(), None)));
        let kubeflow = |controller| [(KUBEFLOW_NAME_LABEL, "train"), (KUBEFLOW_CONTROLLER_LABEL, controller)];
        let group = Some((GangOrigin::PyTorchJob, "train".to_owned(), None));
        check_group(&kubeflow("pytorchjob-controller"), &all, group);
        assert_eq!(check(&map(&all)), Ok(()));
        for labels in [&kubeflow("mpijob-controller")[..], &[("job-name", "train")], &[]] {
            assert_eq!(read(labels, &all), Err(BadGang::NoJobObject));
        }
    }

    #[test]
    fn reads_the_group_of_kubernetes_own_field() {
        let json = r#"{"metadata":{"namespace":"team","name":"p"},"spec":{"schedulingGroup":{"podGroupName":"train"}}}"#;
        let pod: Pod = serde_json::from_str(json).unwrap();
        let found = membership(&pod).unwrap().unwrap();
        assert_eq!((found.gang.origin, found.gang.name.as_str()), (GangOrigin::Kubernetes, "train"));
        assert_eq!(found.size, None);
        let json = r#"{"spec":{"schedulingGroup":{"podGroupName":null}}}"#;
        assert_eq!(membership(&serde_json::from_str(json).unwrap()), Ok(None));
    }

    #[test]
    fn reads_the_topology_level() {
        let topology = |value| {
            let annotations = [(KEY, "train/4"), (TOPOLOGY_KEY, value)];
            read(&[], &annotations).map(|member| member.unwrap().topology)
        };
        let rack = "example.com/rack".to_owned();
        assert_eq!(topology("required=example.com/rack"), Ok(TopologyWish::Required(rack.clone())));
        assert_eq!(topology("preferred=example.com/rack"), Ok(TopologyWish::Preferred(rack)));
        for bad in ["", "rack", "required=", "near=rack", "required=a/b/c", "required=a b"] {
            assert_eq!(topology(bad), Err(BadGang::Topology(bad.to_owned())));
        }
    }

    #[test]
    fn every_error_says_what_to_write_instead() {
        for value in
            ["", "/", "train", "train/", "/4", "train/x", "tr ain/4", "train/-4", "train/99999999999"]
        {
            assert_eq!(
                read(&[], &[(KEY, value)]).unwrap_err().to_string(),
                format!(
                    "tessera.dev/gang: found {value:?}; write NAME/SIZE, such as train/4, or only SIZE for the pods of \
                     one job"
                )
            );
        }
        assert_eq!(
            read(&[], &[(KEY, "train/0")]).unwrap_err().to_string(),
            "tessera.dev/gang: found size 0; write the number of pods in the gang, from 1 to 10000"
        );
        assert_eq!(
            read(&[], &[(KEY, "4")]).unwrap_err().to_string(),
            "tessera.dev/gang: found \"4\" on a pod that belongs to no job, so the gang has no name; write NAME/SIZE, \
             such as train/4"
        );
    }

    #[test]
    fn keys_of_other_projects_never_make_a_pod_invalid() {
        let light = [(LIGHT_NAME_LABEL, "train"), (LIGHT_SIZE_LABEL, "all")];
        check_group(&light, &[], Some((GangOrigin::Coscheduling, "train".to_owned(), None)));
        check_group(&[], &[(VOLCANO_ANNOTATION, "no name!")], None);
    }
}
