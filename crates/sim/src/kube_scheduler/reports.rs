//! What kube-scheduler reports on pods that wait.

/// Reasons and messages of kube-scheduler's condition `PodScheduled` for a pod that waits although GPUs are free:
/// one of every plugin that filters, of preemption, of gates, and of errors.
pub const REPORTS: [(&str, &str); 24] = [
    ("Unschedulable", "0/1 nodes are available: 1 node(s) were unschedulable."),
    ("Unschedulable", "0/1 nodes are available: 1 node(s) had untolerated taint(s)."),
    ("Unschedulable", "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector."),
    ("Unschedulable", "0/1 nodes are available: 1 node(s) didn't match the requested node name."),
    (
        "Unschedulable",
        "0/1 nodes are available: 1 node(s) didn't have free ports for the requested pod ports.",
    ),
    ("Unschedulable", "0/1 nodes are available: 1 Insufficient cpu."),
    ("Unschedulable", "0/1 nodes are available: 1 Insufficient memory."),
    ("Unschedulable", "0/1 nodes are available: 1 Insufficient ephemeral-storage."),
    ("Unschedulable", "0/1 nodes are available: 1 Insufficient example.com/nic."),
    ("Unschedulable", "0/1 nodes are available: 1 Too many pods."),
    ("Unschedulable", "0/1 nodes are available: 1 node(s) had no available disk."),
    ("Unschedulable", "0/1 nodes are available: 1 node(s) exceed max volume count."),
    ("Unschedulable", "0/1 nodes are available: 1 node(s) didn't find available persistent volumes to bind."),
    ("Unschedulable", "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims."),
    ("Unschedulable", "0/1 nodes are available: 1 node(s) had volume node affinity conflict."),
    ("Unschedulable", "0/1 nodes are available: persistentvolumeclaim \"data\" not found."),
    ("Unschedulable", "0/1 nodes are available: 1 node(s) didn't match pod topology spread constraints."),
    ("Unschedulable", "0/1 nodes are available: 1 node(s) didn't match pod affinity rules."),
    ("Unschedulable", "0/1 nodes are available: 1 node(s) didn't match pod anti-affinity rules."),
    ("Unschedulable", "0/1 nodes are available: 1 node(s) didn't satisfy existing pods anti-affinity rules."),
    ("Unschedulable", "0/1 nodes are available: 1 cannot allocate all claims."),
    ("Unschedulable", "0/1 nodes are available: 1 Preemption is not helpful for scheduling."),
    ("SchedulingGated", "Scheduling is blocked due to non-empty scheduling gates"),
    ("SchedulerError", "running PreBind plugin: timed out"),
];
