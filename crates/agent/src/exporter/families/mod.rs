//! The same picture in the words of each project.
