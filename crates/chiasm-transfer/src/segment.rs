//! An arena's file: creating, opening and naming it.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags};

use crate::ArenaProblem;
use crate::layout::{HEADER_BYTES, Header};
use crate::mapping::Mapping;
use crate::owner::Owner;

/// The permissions of an arena's file: only this user may read and write it.
const MODE: rustix::fs::RawMode = 0o600;

/// Returns the file name of an arena, which contains its owner and number.
pub(crate) fn name(owner: Owner, number: u64) -> String {
    format!("chiasm.{}.{}.{number:016x}", owner.pid, owner.start)
}

/// Parses owner and number from a file name. Returns `None` if [`name`] can't have made it.
pub(crate) fn parse_name(name: &str) -> Option<(Owner, u64)> {
    let decimal = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let mut parts = name.strip_prefix("chiasm.")?.split('.');
    let pid = parts.next()?;
    let start = parts.next()?;
    let number = parts.next()?;
    let hex =
        number.len() == 16 && number.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    if parts.next().is_some() || !decimal(pid) || !decimal(start) || !hex {
        return None;
    }
    let owner = Owner { pid: pid.parse().ok()?, start: start.parse().ok()? };
    Some((owner, u64::from_str_radix(number, 16).ok()?))
}

/// Creates an arena's file, complete and locked, and names it last. A process that is killed before
/// that leaves nothing behind.
pub(crate) fn create(dir: &Path, name: &str, header: &Header) -> io::Result<(File, Mapping)> {
    let file = unnamed_file(dir)?;
    // The mode at creation is reduced by the umask.
    rustix::fs::fchmod(&file, Mode::from_raw_mode(MODE))?;
    rustix::fs::ftruncate(&file, header.length)?;
    reserve(&file, 0, header.slots)?;
    // Held while this process has the file open: another process that gets the lock knows that the
    // owner is gone.
    file.try_lock().map_err(io::Error::from)?;
    file.write_all_at(&header.encode(), 0)?;
    let mapping = Mapping::new(&file, header)?;
    link(&file, dir, name)?;
    Ok((file, mapping))
}

/// Creates a file with the concatenated parts, `length` bytes in total, complete and locked, and
/// names it last. Only this user may open it.
pub(crate) fn create_with(
    dir: &Path,
    name: &str,
    length: u64,
    parts: &[impl AsRef<[u8]>],
) -> io::Result<File> {
    let file = unnamed_file(dir)?;
    rustix::fs::fchmod(&file, Mode::from_raw_mode(MODE))?;
    // Writing to pages without memory behind them would kill this process.
    if length > 0 {
        reserve(&file, 0, length)?;
    }
    file.try_lock().map_err(io::Error::from)?;
    let mut offset = 0;
    for part in parts {
        let part = part.as_ref();
        file.write_all_at(part, offset)?;
        offset += part.len() as u64;
    }
    link(&file, dir, name)?;
    Ok(file)
}

/// Links an unnamed file under `name`.
fn link(file: &File, dir: &Path, name: &str) -> io::Result<()> {
    let unnamed = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok(rustix::fs::linkat(CWD, unnamed, CWD, dir.join(name), AtFlags::SYMLINK_FOLLOW)?)
}

/// Creates a file without a name.
#[cfg(target_os = "linux")]
fn unnamed_file(dir: &Path) -> io::Result<File> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::TMPFILE;
    Ok(rustix::fs::openat(CWD, dir, flags, Mode::from_raw_mode(MODE))?.into())
}

/// Fails: other systems have no unnamed files. Engines get all tensors in messages there.
#[cfg(not(target_os = "linux"))]
fn unnamed_file(_dir: &Path) -> io::Result<File> {
    Err(io::Error::new(io::ErrorKind::Unsupported, "arenas need Linux"))
}

/// Reserves memory behind these bytes, so that accessing them can't kill a process.
pub(crate) fn reserve(file: &File, offset: u64, length: u64) -> io::Result<()> {
    loop {
        match rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), offset, length) {
            Err(rustix::io::Errno::INTR) => {}
            result => return result.map_err(io::Error::from),
        }
    }
}

/// The identity of a file among all files that exist at the same time: device and inode.
pub(crate) type FileId = (u64, u64);

/// Opens an arena of this user.
///
/// # Errors
/// [`Unsuitable`] if the file can't be opened or is not a valid arena.
pub(crate) fn open(
    dir: &Path,
    name: &str,
    number: u64,
) -> Result<(FileId, Header, Mapping), Unsuitable> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let file = File::from(
        rustix::fs::openat(CWD, dir.join(name), flags, Mode::empty()).map_err(io::Error::from)?,
    );
    let stat = rustix::fs::fstat(&file).map_err(io::Error::from)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(Unsuitable::Problem(ArenaProblem::NotAFile));
    }
    if stat.st_uid != rustix::process::geteuid().as_raw() || stat.st_mode & 0o7777 != MODE {
        return Err(Unsuitable::Problem(ArenaProblem::NotPrivate));
    }
    let length = stat.st_size.unsigned_abs();
    if length < HEADER_BYTES as u64 {
        return Err(Unsuitable::Problem(ArenaProblem::NotAnArena));
    }
    let mut bytes = [0; HEADER_BYTES];
    file.read_exact_at(&mut bytes, 0)?;
    let header = Header::decode(&bytes, length).map_err(Unsuitable::Problem)?;
    if header.number != number {
        return Err(Unsuitable::Problem(ArenaProblem::Number));
    }
    let mapping = Mapping::new(&file, &header)?;
    Ok(((stat.st_dev, stat.st_ino), header, mapping))
}

/// The reason why a file can't be used as an arena.
pub(crate) enum Unsuitable {
    Io(io::Error),
    Problem(ArenaProblem),
}

impl From<io::Error> for Unsuitable {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_contains_owner_and_number() {
        let owner = Owner { pid: 12, start: 3456 };
        assert_eq!(name(owner, 0xab), "chiasm.12.3456.00000000000000ab");
        assert_eq!(parse_name("chiasm.12.3456.00000000000000ab"), Some((owner, 0xab)));
        for other in [
            "chiasm.12.3456.ab",
            "chiasm.12.3456.00000000000000AB",
            "chiasm.12.+3.00000000000000ab",
            "chiasm.12..00000000000000ab",
            "chiasm.12.3456.00000000000000ab.x",
            "chiasm.12.3456",
            "../chiasm.12.3456.00000000000000ab",
            "sem.chiasm",
            "",
        ] {
            assert_eq!(parse_name(other), None, "{other}");
        }
    }
}
