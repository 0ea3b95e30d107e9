//! An arena's file: made, opened, named.

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

const MODE: rustix::fs::RawMode = 0o600;

/// The file name that tells an arena's owner and number.
pub(crate) fn name(owner: Owner, number: u64) -> String {
    format!("chiasm.{}.{}.{number:016x}", owner.pid, owner.start)
}

/// Reads owner and number out of a file name; `None` if it is not one that [`name`] gives.
pub(crate) fn parse_name(name: &str) -> Option<(Owner, u64)> {
    let decimal = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let mut parts = name.strip_prefix("chiasm.")?.split('.');
    let (pid, start, number) = (parts.next()?, parts.next()?, parts.next()?);
    let hex =
        number.len() == 16 && number.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    if parts.next().is_some() || !decimal(pid) || !decimal(start) || !hex {
        return None;
    }
    let owner = Owner { pid: pid.parse().ok()?, start: start.parse().ok()? };
    Some((owner, u64::from_str_radix(number, 16).ok()?))
}

/// Makes an arena's file, complete and locked, and gives it its name last. A process that is killed
/// before that leaves nothing.
pub(crate) fn create(dir: &Path, name: &str, header: &Header) -> io::Result<(File, Mapping)> {
    let file = unnamed_file(dir)?;
    // The umask has taken its part.
    rustix::fs::fchmod(&file, Mode::from_raw_mode(MODE))?;
    rustix::fs::ftruncate(&file, header.length)?;
    reserve(&file, 0, header.slots)?;
    // Held as long as this process has the file open: whoever gets it knows that the owner is gone.
    file.try_lock().map_err(io::Error::from)?;
    file.write_all_at(&header.encode(), 0)?;
    let mapping = Mapping::new(&file, header)?;
    give_name(&file, dir, name)?;
    Ok((file, mapping))
}

/// Makes a file with these parts one after the other, `length` bytes in all, complete and locked,
/// and gives it its name last. It is nobody's but this user's.
pub(crate) fn create_with(
    dir: &Path,
    name: &str,
    length: u64,
    parts: &[impl AsRef<[u8]>],
) -> io::Result<File> {
    let file = unnamed_file(dir)?;
    rustix::fs::fchmod(&file, Mode::from_raw_mode(MODE))?;
    // Without memory behind all of it writing would end this process.
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
    give_name(&file, dir, name)?;
    Ok(file)
}

fn give_name(file: &File, dir: &Path, name: &str) -> io::Result<()> {
    let unnamed = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok(rustix::fs::linkat(CWD, unnamed, CWD, dir.join(name), AtFlags::SYMLINK_FOLLOW)?)
}

/// Makes a file that has no name yet.
#[cfg(target_os = "linux")]
fn unnamed_file(dir: &Path) -> io::Result<File> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::TMPFILE;
    Ok(rustix::fs::openat(CWD, dir, flags, Mode::from_raw_mode(MODE))?.into())
}

/// Fails: other systems have no such files, and engines get everything in messages there.
#[cfg(not(target_os = "linux"))]
fn unnamed_file(_dir: &Path) -> io::Result<File> {
    Err(io::Error::new(io::ErrorKind::Unsupported, "arenas need Linux"))
}

/// Makes sure that there is memory behind these bytes, so that touching them can't kill anybody.
pub(crate) fn reserve(file: &File, offset: u64, length: u64) -> io::Result<()> {
    loop {
        match rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), offset, length) {
            Err(rustix::io::Errno::INTR) => {}
            result => return result.map_err(io::Error::from),
        }
    }
}

/// Tells a file from all others that are there at the same time, whatever their names: device and
/// inode.
pub(crate) type FileId = (u64, u64);

/// Opens an arena of this user.
///
/// # Errors
/// What is wrong with it, if it is there: see [`Unsuitable`].
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

/// Why a file is not taken for an arena.
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
    fn names_tell_their_owner() {
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
