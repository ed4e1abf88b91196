//! The machine without anything around it: a make-believe kubelet in a few lines asks as a real one does.

mod absent;
mod hostile;
mod kubelet;
mod measured;
mod orders;
mod situations;
mod troubles;
