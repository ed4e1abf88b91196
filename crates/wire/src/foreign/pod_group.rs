//! Objects of several projects that state how many pods must start together: PodGroups, JobSets and Kubeflow's jobs.

use serde_json::Value;
use tessera_core::gang::TopologyWish;

use crate::tessera::gang::{GangKey, GangOrigin, MAX_SIZE, is_label};

/// A kind of object with the size of a gang that an API server may serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PodGroupApi {
    /// The project whose pods name these objects.
    pub origin: GangOrigin,
    /// API group of the objects.
    pub group: &'static str,
    /// API version of the objects.
    pub version: &'static str,
    /// Kind of the objects.
    pub kind: &'static str,
    /// Name of the objects in paths of the API.
    pub plural: &'static str,
}

/// The kinds of objects that Tessera reads. Each origin has one.
pub const POD_GROUP_APIS: [PodGroupApi; 10] = [
    pod_group(GangOrigin::Coscheduling, "scheduling.x-k8s.io", "v1alpha1"),
    pod_group(GangOrigin::Volcano, "scheduling.volcano.sh", "v1beta1"),
    pod_group(GangOrigin::Kai, "scheduling.run.ai", "v2alpha2"),
    pod_group(GangOrigin::Kubernetes, "scheduling.k8s.io", "v1alpha2"),
    PodGroupApi {
        origin: GangOrigin::JobSet,
        group: "jobset.x-k8s.io",
        version: "v1alpha2",
        kind: "JobSet",
        plural: "jobsets",
    },
    kubeflow_job(GangOrigin::PyTorchJob, "PyTorchJob", "pytorchjobs"),
    kubeflow_job(GangOrigin::TensorFlowJob, "TFJob", "tfjobs"),
    kubeflow_job(GangOrigin::XgBoostJob, "XGBoostJob", "xgboostjobs"),
    kubeflow_job(GangOrigin::PaddleJob, "PaddleJob", "paddlejobs"),
    kubeflow_job(GangOrigin::JaxJob, "JAXJob", "jaxjobs"),
];

const fn pod_group(origin: GangOrigin, group: &'static str, version: &'static str) -> PodGroupApi {
    PodGroupApi { origin, group, version, kind: "PodGroup", plural: "podgroups" }
}

const fn kubeflow_job(origin: GangOrigin, kind: &'static str, plural: &'static str) -> PodGroupApi {
    PodGroupApi { origin, group: "kubeflow.org", version: "v1", kind, plural }
}

impl PodGroupApi {
    /// Returns the kind of the objects with the sizes of gangs of this origin, or `None` if pods state the sizes.
    #[must_use]
    pub fn of(origin: GangOrigin) -> Option<Self> {
        POD_GROUP_APIS.into_iter().find(|api| api.origin == origin)
    }
}

/// What an object states about its gang.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodGroup {
    /// The gang of the pods that name the object.
    pub gang: GangKey,
    /// Number of pods that start together. `None` if the object states none, or none that is possible; its pods
    /// are then placed one by one.
    pub size: Option<u32>,
    /// The topology level that the object requires.
    pub topology: TopologyWish,
}

impl PodGroup {
    /// Reads an object of any of the kinds. The type of each field is checked, because the schema of such an object
    /// is that of a cluster's administrator.
    #[must_use]
    pub fn new(origin: GangOrigin, namespace: &str, name: &str, spec: &Value) -> Self {
        let size = match origin {
            GangOrigin::Kubernetes => number(spec.pointer("/schedulingPolicy/gang/minCount")),
            GangOrigin::JobSet => pods_of_jobset(spec),
            GangOrigin::PyTorchJob
            | GangOrigin::TensorFlowJob
            | GangOrigin::XgBoostJob
            | GangOrigin::PaddleJob
            | GangOrigin::JaxJob => pods_of_kubeflow_job(spec),
            _ => number(spec.get("minMember")),
        };
        let key = match origin {
            GangOrigin::Kubernetes => spec.pointer("/schedulingConstraints/topology/0/key"),
            _ => None,
        };
        let key = key.and_then(Value::as_str).filter(|key| is_label(key));
        Self {
            gang: GangKey { namespace: namespace.to_owned(), name: name.to_owned(), origin },
            size: size.and_then(|size| u32::try_from(size).ok()).filter(|size| (1..=MAX_SIZE).contains(size)),
            topology: key.map_or(TopologyWish::Any, |key| TopologyWish::Required(key.to_owned())),
        }
    }
}

fn number(value: Option<&Value>) -> Option<u64> {
    value.and_then(Value::as_u64)
}

/// Returns the number of pods that a JobSet has at the same time, or `None` if its Jobs start one after the other.
fn pods_of_jobset(spec: &Value) -> Option<u64> {
    let order = spec.pointer("/startupPolicy/startupPolicyOrder").and_then(Value::as_str);
    let jobs = spec.get("replicatedJobs")?.as_array()?;
    let waits = |job: &Value| job.get("dependsOn").and_then(Value::as_array).is_some_and(|on| !on.is_empty());
    if order == Some("InOrder") || jobs.iter().any(waits) {
        return None;
    }
    let pods = jobs.iter().map(|job| {
        let of_job = |field: &str| number(job.pointer(&format!("/template/spec/{field}")));
        let parallel = of_job("parallelism").unwrap_or(1);
        let at_once = of_job("completions").map_or(parallel, |completions| completions.min(parallel));
        number(job.get("replicas")).unwrap_or(1).saturating_mul(at_once)
    });
    Some(pods.fold(0, u64::saturating_add))
}

/// Returns the number of pods of a job of Kubeflow's training operator: what its scheduling policy says, or all replicas.
fn pods_of_kubeflow_job(spec: &Value) -> Option<u64> {
    let replicas =
        spec.as_object()?.iter().find(|(field, _)| field.ends_with("ReplicaSpecs"))?.1.as_object()?;
    let all = replicas.values().map(|of_type| number(of_type.get("replicas")).unwrap_or(1));
    let least = number(spec.pointer("/runPolicy/schedulingPolicy/minAvailable"));
    Some(least.unwrap_or_else(|| all.fold(0, u64::saturating_add)))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn reads_the_size_where_each_project_states_it() {
        let size = |origin, spec: Value| PodGroup::new(origin, "team", "train", &spec).size;
        for origin in [GangOrigin::Coscheduling, GangOrigin::Volcano, GangOrigin::Kai] {
            assert_eq!(size(origin, json!({ "minMember": 3 })), Some(3));
        }
        let policy = json!({ "schedulingPolicy": { "gang": { "minCount": 4 } }, "minMember": 3 });
        assert_eq!(size(GangOrigin::Kubernetes, policy), Some(4));
        assert_eq!(size(GangOrigin::Kubernetes, json!({ "schedulingPolicy": { "basic": {} } })), None);
    }

    #[test]
    fn adds_up_the_pods_that_a_jobset_has_at_the_same_time() {
        let size = |spec: Value| PodGroup::new(GangOrigin::JobSet, "team", "train", &spec).size;
        let job = |replicas: u64, spec: Value| json!({ "replicas": replicas, "template": { "spec": spec } });
        let leader = json!({ "name": "leader", "template": { "spec": {} } });
        let workers = job(2, json!({ "parallelism": 4, "completions": 4 }));
        assert_eq!(size(json!({ "replicatedJobs": [leader, workers] })), Some(9));
        assert_eq!(
            size(json!({ "replicatedJobs": [job(2, json!({ "parallelism": 4, "completions": 3 }))] })),
            Some(6)
        );
        assert_eq!(size(json!({ "replicatedJobs": [] })), None);
        let mut second = workers.clone();
        second["dependsOn"] = json!([{ "name": "leader", "status": "Ready" }]);
        assert_eq!(size(json!({ "replicatedJobs": [leader, second] })), None);
        let in_order = json!({ "startupPolicyOrder": "InOrder" });
        assert_eq!(size(json!({ "replicatedJobs": [leader, workers], "startupPolicy": in_order })), None);
        let huge = [job(u64::MAX, json!({ "parallelism": u64::MAX })), workers];
        assert_eq!(size(json!({ "replicatedJobs": huge })), None);
        for bad in [json!(null), json!({ "replicatedJobs": {} })] {
            assert_eq!(size(bad), None);
        }
    }

    #[test]
    fn adds_up_the_replicas_of_a_kubeflow_job() {
        let size = |spec: Value| PodGroup::new(GangOrigin::PyTorchJob, "team", "train", &spec).size;
        let replicas = json!({ "Master": {}, "Worker": { "replicas": 3 } });
        assert_eq!(size(json!({ "pytorchReplicaSpecs": replicas })), Some(4));
        let policy = json!({ "schedulingPolicy": { "minAvailable": 2 } });
        assert_eq!(size(json!({ "pytorchReplicaSpecs": replicas, "runPolicy": policy })), Some(2));
        assert_eq!(size(json!({ "runPolicy": policy })), None);
    }

    #[test]
    fn each_origin_has_one_kind_of_objects() {
        for api in POD_GROUP_APIS {
            assert_eq!(PodGroupApi::of(api.origin), Some(api));
        }
        assert_eq!(PodGroupApi::of(GangOrigin::Tessera), None);
    }

    #[test]
    fn reads_the_topology_level_of_kubernetes_own_groups() {
        let topology = |spec: Value| PodGroup::new(GangOrigin::Kubernetes, "team", "train", &spec).topology;
        let at = |key: &str| topology(json!({ "schedulingConstraints": { "topology": [{ "key": key }] } }));
        assert_eq!(at("example.com/rack"), TopologyWish::Required("example.com/rack".to_owned()));
        assert_eq!(at("no label"), TopologyWish::Any);
        assert_eq!(topology(json!({})), TopologyWish::Any);
    }

    #[test]
    fn an_impossible_size_is_no_size() {
        for spec in
            [json!(null), json!({}), json!([3]), json!({ "minMember": 0 }), json!({ "minMember": -1 })]
        {
            assert_eq!(PodGroup::new(GangOrigin::Volcano, "team", "train", &spec).size, None);
        }
        for size in [json!("3"), json!(3.5), json!(10_001), json!(u64::MAX)] {
            let spec = json!({ "minMember": size });
            assert_eq!(PodGroup::new(GangOrigin::Volcano, "team", "train", &spec).size, None);
        }
    }
}
