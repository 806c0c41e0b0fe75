from __future__ import annotations

import pytest

from foedus.data.speeches import parse_plays
from foedus.errors import DataError

NOTICE = """\
<<THIS ELECTRONIC VERSION OF THE COMPLETE WORKS OF WILLIAM
SHAKESPEARE IS COPYRIGHT 1990-1993 BY WORLD LIBRARY, INC., AND IS
PROVIDED BY PROJECT GUTENBERG ETEXT OF ILLINOIS BENEDICTINE COLLEGE
WITH PERMISSION.  ELECTRONIC AND MACHINE READABLE COPIES MAY BE
DISTRIBUTED SO LONG AS SUCH COPIES (1) ARE FOR YOUR OR OTHERS
PERSONAL USE ONLY, AND (2) ARE NOT DISTRIBUTED OR USED
COMMERCIALLY.  PROHIBITED COMMERCIAL DISTRIBUTION INCLUDES BY ANY
SERVICE THAT CHARGES FOR DOWNLOAD TIME OR FOR MEMBERSHIP.>>
"""

# A few lines in the layout of the edition, with its irregularities. Blanks at the ends of lines are
# where it has page breaks.
EDITION = f"""\
This is the 100th Etext file presented by Project Gutenberg, and
is presented in cooperation with World Library, Inc., from their

{NOTICE}

1609

THE SONNETS

by William Shakespeare



                     1
  From fairest creatures we desire increase,
  AMEN. Thereby beauty's rose might never die,

THE END


{NOTICE}




1603

ALLS WELL THAT ENDS WELL

by William Shakespeare


Dramatis Personae

  KING OF FRANCE
  A WIDOW OF FLORENCE. Mother to Diana


{NOTICE}


SCENE:
Rousillon; Paris


ACT I. SCENE 1.
Rousillon. The COUNT'S palace

Enter BERTRAM, the COUNTESS OF ROUSILLON, HELENA, and LAFEU, all in black

  COUNTESS. In delivering my son from me, I bury a second husband.
  BERTRAM. And I in going, madam, weep o'er my father's death anew;
    but I must attend his Majesty's command, to whom I am now in
     ward, evermore in subjection.{"  "}
  COUNTESS. Heaven bless him! Farewell, Bertram.            Exit
  BERTRAM. The best wishes that can be forg'd in your thoughts be
    servants to you!  [To HELENA]  Be comfortable to my mother. [A stool
    brought] Make much of her.
                                          [GUARDS seize BERTRAM]
 Exit
LAFEU. Farewell, pretty lady.
  HELENA.                                                [Reads]
    'Jockey of Norfolk, be not so bold.'
      Who comes here?
{"  "}
                       Enter PAROLLES

    [Aside]   One that goes with him. I love him for his sake;

{NOTICE}

    And yet I know him a notorious liar.

                      His ORATION to his ARMY

  RICHARD the Second here was hack'd to death;

        Enter GREMIO, with LUCENTIO in the habit of a mean man;
    as LUCENTIO, with his boy, bearing a lute and books

    O, were that all!

     Flourish. Enter ANTONY,
  BISHOP of ELY.Marry and will, my lord,
    with all my heart.

ACT I. SCENE 2.
Paris. The KING'S palace

Enter two GENTLEMEN

  GRUMIO, BIONDELLO. O excellent motion!
  Amen. Fellows, let's be gone.
  BISHOP OF ELY. Where is my lord?                        Exeunt

THE END


{NOTICE}


1593

THE COMEDY OF ERRORS


by William Shakespeare



DRAMATIS PERSONAE

SOLINUS, Duke of Ephesus
AEGEON, a merchant of Syracuse

SCENE:
Ephesus


THE COMEDY OF ERRORS

ACT I. SCENE 1

A hall in the DUKE'S palace

Enter the DUKE OF EPHESUS, AEGEON, the Merchant
of Syracuse, GAOLER, OFFICERS, and other ATTENDANTS

AEGEON. Proceed, Solinus, to procure my fall,
  And by the doom of death end woes and all.
<Exeunt

SCENE 2

The mart

Enter ANTIPHOLUS OF SYRACUSE and DROMIO OF SYRACUSE

ANTIPHOLUS OF SYRACUSE. What, wilt thou flout me thus unto my face,
  Being forbid? There, take you that, sir knave.
[Beats him]

Enter DROMIO OF EPHESUS

  Here comes the almanac of my true date.
DROMIO OF EPHESUS. To me, sir? Why, you gave no gold to me.
  ANTIPHOLUS OF SYRACUSE. Come on, sir knave, have done your foolishness,
  Dromio. Tell me how thou hast dispos'd thy charge.
  I, Dromio. So it is.
  O Dromio. So it is.
  O. So it is.
<Exit


{NOTICE}


ACT Il. SCENE 1

The house of ANTIPHOLUS OF EPHESUS

Enter ADRIANA

A SERVANT. Neither my husband nor the slave return'd.

THE END


{NOTICE}



1595

THE TRAGEDY OF ROMEO AND JULIET


by William Shakespeare



Dramatis Personae

  Escalus, Prince of Verona.

                            SCENE.- Verona; Mantua.

                        THE PROLOGUE

THE PROLOGUE
    A public place

Enter Chorus.

  Chor. Two households, both alike in dignity,
    In fair Verona, where we lay our scene.              [Exit.




ACT I. Scene I.
Verona. A public place.

Enter Sampson and Gregory

  Samp. I strike quickly, being moved.
  M. Wife. Thou shalt not stir one foot to seek a foe.
  SAMP. Well, sir.
  Lady P. Go, ye giddy goose.

  Enter Friar [Laurence] and the County [Paris], with Musicians.

  1. Mus. Faith, we may put up our pipes and be gone.
  2. Mus. Hang him, Jack!

           'When griping grief the heart doth wound.'

THE END


{NOTICE}


1609

A LOVER'S COMPLAINT

by William Shakespeare



  From off a hill whose concave womb reworded
  A plaintful story from a sist'ring vale.

THE END

  LICENSE. You may distribute copies of this etext
"""

# By hand: what each character says there, lines broken as there.
USERS = {
    "ALLS_WELL_THAT_ENDS_WELL_COUNTESS": [
        "In delivering my son from me, I bury a second husband.",
        "Heaven bless him! Farewell, Bertram.",
    ],
    "ALLS_WELL_THAT_ENDS_WELL_BERTRAM": [
        "And I in going, madam, weep o'er my father's death anew;\n"
        "but I must attend his Majesty's command, to whom I am now in\n"
        "ward, evermore in subjection.",
        "The best wishes that can be forg'd in your thoughts be\n"
        "servants to you! Be comfortable to my mother. Make much of her.",
    ],
    "ALLS_WELL_THAT_ENDS_WELL_LAFEU": ["Farewell, pretty lady."],
    "ALLS_WELL_THAT_ENDS_WELL_HELENA": [
        "'Jockey of Norfolk, be not so bold.'\n"
        "Who comes here?\n"
        "One that goes with him. I love him for his sake;\n"
        "And yet I know him a notorious liar.\n"
        "RICHARD the Second here was hack'd to death;\n"
        "O, were that all!",
    ],
    "ALLS_WELL_THAT_ENDS_WELL_BISHOP_OF_ELY": [
        "Marry and will, my lord,\nwith all my heart.",
        "Where is my lord?",
    ],
    "ALLS_WELL_THAT_ENDS_WELL_GRUMIO_BIONDELLO": [
        "O excellent motion!\nAmen. Fellows, let's be gone."
    ],
    "THE_COMEDY_OF_ERRORS_AEGEON": [
        "Proceed, Solinus, to procure my fall,\nAnd by the doom of death end woes and all."
    ],
    "THE_COMEDY_OF_ERRORS_ANTIPHOLUS_OF_SYRACUSE": [
        "What, wilt thou flout me thus unto my face,\n"
        "Being forbid? There, take you that, sir knave.\n"
        "Here comes the almanac of my true date.",
        "Come on, sir knave, have done your foolishness,\n"
        "Dromio. Tell me how thou hast dispos'd thy charge.\n"
        "I, Dromio. So it is.\n"
        "O Dromio. So it is.\n"
        "O. So it is.",
    ],
    "THE_COMEDY_OF_ERRORS_DROMIO_OF_EPHESUS": ["To me, sir? Why, you gave no gold to me."],
    "THE_COMEDY_OF_ERRORS_A_SERVANT": ["Neither my husband nor the slave return'd."],
    "THE_TRAGEDY_OF_ROMEO_AND_JULIET_CHOR": [
        "Two households, both alike in dignity,\nIn fair Verona, where we lay our scene."
    ],
    "THE_TRAGEDY_OF_ROMEO_AND_JULIET_SAMP": ["I strike quickly, being moved.", "Well, sir."],
    "THE_TRAGEDY_OF_ROMEO_AND_JULIET_M_WIFE": ["Thou shalt not stir one foot to seek a foe."],
    "THE_TRAGEDY_OF_ROMEO_AND_JULIET_LADY_P": ["Go, ye giddy goose."],
    "THE_TRAGEDY_OF_ROMEO_AND_JULIET_1_MUS": ["Faith, we may put up our pipes and be gone."],
    "THE_TRAGEDY_OF_ROMEO_AND_JULIET_2_MUS": ["Hang him, Jack!"],
}


def test_every_character_of_the_sample():
    users = parse_plays(EDITION, "100.txt", plays=3, speakers=len(USERS))
    assert {user["id"]: user["speeches"] for user in users} == USERS
    assert [user["id"] for user in users] == list(USERS)  # in order of appearance
    assert [set(user) for user in users] == [{"id", "play", "speaker", "speeches"}] * len(USERS)
    named = {user["id"]: (user["play"], user["speaker"]) for user in users}
    assert named["ALLS_WELL_THAT_ENDS_WELL_BISHOP_OF_ELY"] == (
        "ALLS WELL THAT ENDS WELL",
        "BISHOP OF ELY",
    )
    assert named["THE_TRAGEDY_OF_ROMEO_AND_JULIET_1_MUS"] == (
        "THE TRAGEDY OF ROMEO AND JULIET",
        "1. MUS",
    )


def spoken(*lines: str) -> list[str]:
    """What is said in a play of these lines."""
    users = parse_plays(
        "\n".join(["A PLAY", "by William Shakespeare", *lines]), "100.txt", plays=0, speakers=0
    )
    return [speech for user in users for speech in user["speeches"]]


@pytest.mark.parametrize(
    "heading", ["ACT I.", "SCENE 1.", "Scene I.", "PROLOGUE", "THE PROLOGUE", "INDUCTION. SCENE I."]
)
def test_speeches_begin_after_a_heading(heading):
    assert spoken("  NYM. A person", heading, "  NYM. Pish!") == ["Pish!"]
    assert spoken("  NYM. A person", f"  {heading}", "  NYM. Pish!") == []


@pytest.mark.parametrize(
    "direction",
    [
        ["    Enter PISTOL"],
        ["    Re-enter PISTOL"],
        ["    Exit PISTOL"],
        ["    Exeunt PISTOL and NYM"],
        ["    Flourish. Enter PISTOL"],
        ["    Alarum within"],
        ["    Sennet. Enter PISTOL"],
        ["    Enter PISTOL,", "    HOSTESS"],
        ["    Enter PISTOL;", "    the HOSTESS following,", "    BOY"],
        ["       Drum afar off"],
        ["       They fight,"],  # the next line is the speech again
        ["His ORATION to his ARMY"],
        [" Music"],
    ],
)
def test_stage_directions(direction):
    assert spoken("ACT I.", "  NYM. I cannot tell;", "", *direction, "    things must be.") == [
        "I cannot tell;\nthings must be."
    ]


def test_words_of_stage_directions_within_a_speech():
    lines = "  KING. God knows, not Henry.", "    Enter his chamber,", "    view his corpse."
    assert spoken("ACT I.", *lines) == [
        "God knows, not Henry.\nEnter his chamber,\nview his corpse."
    ]
    lines = "  KING. God knows.", " " * 40 + "Exit WARWICK,", "    not Henry."
    assert spoken("ACT I.", *lines) == ["God knows.\nnot Henry."]


@pytest.mark.parametrize(("plays", "speakers"), [(4, 1), (1, len(USERS) + 1)])
def test_too_few_plays_or_characters(plays, speakers):
    with pytest.raises(
        DataError, match=f"100.txt does not look like .* expected at least {plays} and {speakers}"
    ):
        parse_plays(EDITION, "100.txt", plays=plays, speakers=speakers)


def test_another_layout_is_refused():
    """The present edition: names in lines of their own, nothing indented."""
    text = (
        "HAMLET\n\nby William Shakespeare\n\nACT I\n\nBARNARDO.\nWho's "
        "there?\n\nFRANCISCO.\nNay, answer me.\n"
    )
    with pytest.raises(DataError, match="0 plays and 0 speaking characters"):
        parse_plays(text * 40, "100-0.txt")
